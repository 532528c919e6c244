"""Workers as actors of a Ray cluster. The one module that imports ray, and only when used."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import socket
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mtpstats.closing import Closing
from mtpstats.dispatch import WorkerDied
from mtpstats.errors import InputError, MtpStatsError
from mtpstats.text import printable

REACH_S: Final = 5.0
LOCAL: Final = "local"
OBJECTS: Final = 100 << 20  # bytes of a local cluster's object store: records are small
_PASSED_ON: Final = ("MTPSTATS_BUILDS", "MTPSTATS_LIBLLAMA")


@dataclass(frozen=True)
class Share:
    """What each worker gets; None: see ``--gpus-per-worker`` and ``--cpus-per-worker``."""

    gpus: float | None = None
    cpus: int | None = None


class Actor:
    """Runs in the actor's process: makes the worker and calls it."""

    def __init__(self, make: Callable[[], Any]) -> None:
        with contextlib.suppress(ValueError):  # not on the main thread
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver ends its workers
        self._worker = make()

    def call(self, method: str, args: Sequence[Any]) -> tuple[bool, Any]:
        """Return (True, what the method gave) or (False, the error we raised on purpose)."""
        try:
            return True, getattr(self._worker, method)(*args)
        except MtpStatsError as error:
            return False, (type(error), str(error))


class RayPool(Closing):
    """A :class:`mtpstats.dispatch.Pool` of actors. Closing it leaves nothing of ours running.

    Args:
        address: ``auto``, ``local``, or HOST:PORT of a cluster this machine belongs to.
        make: makes a worker, given the CPUs it has; it is sent to the actors.
        n_workers: how many there are to be; None: as many as the cluster holds.

    Raises:
        InputError: no ray, no such cluster within seconds, or no machine in it that has a share.
    """

    def __init__(
        self,
        address: str,
        make: Callable[[int], Callable[[], Any]],
        share: Share,
        n_workers: int | None,
    ) -> None:
        self._ray = _imported()
        self._stack = contextlib.ExitStack()
        try:
            self._connect(address, share, n_workers)
            self.gpus, self.cpus, fitting = self._shares(share, n_workers)
            self.n_workers = n_workers or fitting
        except BaseException:
            self.close()
            raise
        options: dict[str, Any] = {
            "num_cpus": self.cpus, "num_gpus": self.gpus, "max_restarts": 0, "max_task_retries": 0,
        }  # fmt: skip
        passed = {key: os.environ[key] for key in _PASSED_ON if key in os.environ}
        if passed and address != LOCAL:
            options["runtime_env"] = {"env_vars": passed}
        self._actor = self._ray.remote(**options)(Actor)
        self._make = make(self.cpus)

    def start(self) -> Any:
        """See :class:`mtpstats.dispatch.Pool`."""
        return self._actor.remote(self._make)

    def call(self, worker: Any, method: str, args: Sequence[Any]) -> Any:
        """See :class:`mtpstats.dispatch.Pool`."""
        return worker.call.remote(method, args)

    def wait(self, tickets: Sequence[Any], timeout: float) -> list[Any]:
        """See :class:`mtpstats.dispatch.Pool`."""
        done, _ = self._ray.wait(tickets, num_returns=1, timeout=timeout)
        return list(done)

    def result(self, ticket: Any) -> Any:
        """See :class:`mtpstats.dispatch.Pool`."""
        exceptions = self._ray.exceptions
        try:
            fine, given = self._ray.get(ticket)
        except (exceptions.RayActorError, exceptions.WorkerCrashedError) as error:
            raise WorkerDied(_short(error)) from None
        except exceptions.RayTaskError as error:
            kind = type(error.cause).__name__
            raise MtpStatsError(f"a worker failed: {kind}: {printable(str(error.cause))}") from None
        except exceptions.RayError as error:
            raise MtpStatsError(f"Ray failed: {_short(error)}") from None
        if not fine:
            kind, words = given
            raised = MtpStatsError(words)
            raised.exit_code = kind.exit_code
            raise raised
        return given

    def kill(self, worker: Any) -> None:
        """See :class:`mtpstats.dispatch.Pool`."""
        with contextlib.suppress(Exception):
            self._ray.kill(worker, no_restart=True)

    def close(self) -> None:
        """Leave the cluster, and end one that was started for this run."""
        self._stack.close()

    def _connect(self, address: str, share: Share, n_workers: int | None) -> None:
        # Ray prints of dead workers on standard output, where a result may go.
        self._stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        before = signal.getsignal(signal.SIGTERM)
        options: dict[str, Any] = {
            "log_to_driver": False, "logging_level": logging.CRITICAL, "configure_logging": True,
        }  # fmt: skip
        if address == LOCAL:
            cpus = max(os.cpu_count() or 1, (n_workers or 1) * (share.cpus or 1))
            options |= {
                "address": LOCAL, "include_dashboard": False, "num_cpus": cpus,
                "object_store_memory": OBJECTS,
            }  # fmt: skip
        else:
            options["address"] = address
            _check_reachable(address)
        where = printable(address)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._ray.init(**options)
        except Exception as error:
            raise InputError(
                f"--ray {where}: no Ray cluster: {_short(error)}; start one with ray start, run "
                "this on one of its machines (where it asks for a token, with RAY_AUTH_MODE=token "
                "and that token), or use --ray local"
            ) from None
        self._stack.callback(self._ray.shutdown)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # Ray put one of its own there

    def _shares(self, share: Share, n_workers: int | None) -> tuple[float, int, int]:
        """Return GPUs and CPUs of a worker, and how many workers the cluster holds."""
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        has_gpus = any(node.get("GPU", 0) for node in nodes)
        gpus = share.gpus if share.gpus is not None else float(has_gpus)

        def by_gpus(node: dict[str, float]) -> int:
            return int(node.get("GPU", 0) / gpus + 1e-9) if gpus else n_workers or 1

        most = max(by_gpus(node) for node in nodes)
        able = [node for node in nodes if by_gpus(node) and node.get("CPU", 0) >= 1]
        cpus = share.cpus
        if cpus is None and able:
            cpus = max(1, min(int(node["CPU"]) // max(by_gpus(node), 1) for node in able))
        fitting = sum(
            min(by_gpus(node) if gpus else 1 << 30, int(node["CPU"]) // (cpus or 1))
            for node in able
        )
        if not fitting:
            raise InputError(
                f"no machine of the cluster has {gpus:g} GPUs and {cpus or 1} CPUs for a worker; "
                f"the most there are: {most if gpus else 0} shares of GPUs, "
                f"{max(int(node.get('CPU', 0)) for node in nodes)} CPUs"
            )
        return gpus, cpus or 1, fitting


def _imported() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # --ray local: loopback alone
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError:
        raise InputError("--ray needs Ray: pip install 'mtpstats[ray]'") from None
    return ray


def _check_reachable(address: str) -> None:
    """Refuse within seconds what Ray would try for a minute."""
    host, _, port = address.rpartition(":")
    if address == "auto":
        return
    if not host or not port.isdecimal() or "/" in address:
        raise InputError(f"--ray {printable(address)}: neither HOST:PORT nor auto nor local")
    try:
        socket.create_connection((host, int(port)), REACH_S).close()
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(f"--ray {printable(address)}: no Ray cluster there: {why}") from None


def _short(error: BaseException) -> str:
    """Return the end of Ray's story in one line."""
    text = " ".join(str(error).split())
    for start in ("Worker exit detail: ", "The actor is dead because ", "cause: "):
        if start in text:
            text = text.split(start, 1)[1]
    text = text.split(" Some common causes", 1)[0]
    return printable(text[:300] or type(error).__name__)
