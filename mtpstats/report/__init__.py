"""Results and comparisons for people, a module for each form.

Nothing here computes: figures come from ``mtpstats.summary``, ``mtpstats.result`` and
``mtpstats.compare``. Everything foreign is escaped.
"""
