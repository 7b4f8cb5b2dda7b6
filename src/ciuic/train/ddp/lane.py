"""One thread that does the hook's work in the order in which DDP hands out its buckets.

Collectives are never sent from a future's callback: on gloo these run in threads of their own, in another order on
each rank, and the ranks wait for each other for ever.
"""

import queue
import threading
from collections.abc import Callable

import torch


class Lane:
    """Runs what it is given, one after the other. Without a thread (CUDA) it runs at once, on the caller's stream."""

    def __init__(self, *, threaded: bool) -> None:
        self._tasks: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._failure: BaseException | None = None
        self._threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._work, name="ciuic-ddp", daemon=True) if threaded else None
        if self._thread is not None:
            self._thread.start()

    def submit(self, task: Callable[[], None], done: Callable[[], None]) -> None:
        """Run `task`, then `done`. After a failure tasks are left out until `wait` has told it; `done` always runs."""
        if self._thread is None:
            self._run(task, done)
        else:
            self._tasks.put(lambda: self._run(task, done))

    def wait(self) -> None:
        """Until all that was submitted has run. Raises what failed first."""
        if self._thread is not None:
            self._tasks.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None and self._thread.is_alive():
            self._tasks.put(None)
            self._thread.join()

    def _run(self, task: Callable[[], None], done: Callable[[], None]) -> None:
        try:
            if self._failure is None:
                task()
        except BaseException as error:  # noqa: BLE001 - told to the thread that waits
            self._failure = error
        finally:
            done()

    def _work(self) -> None:
        torch.set_num_threads(self._threads)  # a new thread would start with one per core
        while True:
            task = self._tasks.get()
            try:
                if task is None:
                    return
                task()
            finally:
                self._tasks.task_done()
