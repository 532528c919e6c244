"""Results for people. One module per form, each with ``render(result) -> str``.

Nothing here computes: figures come from ``mtpstats.stats`` and ``mtpstats.result``.
"""
