"""A running engine, watched: a load drives it in a background thread, and a picture of it is drawn again and again.

Owns the two threads and their end; what is drawn is `live_picture` (widgets_charts.py). The engine lives in this
process, so drawing takes time from its steps: that shows as longer gaps, and is what lesson 04 is about. Without a
front end the load runs to its end first, and one picture shows it whole. Laws: tests/test_widgets.py.
"""

from __future__ import annotations

import atexit
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nanoserve.client import InProcessClient
from nanoserve.lab.climb import warm_up
from nanoserve.lab.loadgen import drive
from nanoserve.lab.widgets import Picture, has_front_end
from nanoserve.lab.widgets_charts import live_picture
from nanoserve.record import ListRecorder, StepRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from nanoserve.config import EngineConfig
    from nanoserve.lab.charts import Setting
    from nanoserve.lab.workload import Workload

PERIOD_S = 0.7  # between two pictures
END_S = 60.0  # for a step under way, and for what the engine has to give back


class _Stopped(Exception):
    """Raised in the engine's thread, between two steps."""


class LiveEngine:
    """A load on a fresh engine, in a thread of its own from the start on. `stop` ends it between two steps."""

    def __init__(self, config: EngineConfig, load: Workload) -> None:
        self.num_blocks = 1
        self.error: Exception | None = None
        self.done = threading.Event()
        self._config = replace(config, client=InProcessClient)
        self._load = load
        self._recorder = ListRecorder()
        self._first: int | None = None  # record after those of the warm-up
        self._stop = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="live-engine", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    @property
    def records(self) -> list[StepRecord]:
        """Of the load, so far."""
        return [] if self._first is None else self._recorder.records[self._first :]

    def stop(self) -> None:
        """Idempotent, from any other thread; the engine is closed when it returns. RuntimeError when it does not end
        within END_S."""
        self._stop.set()
        self.wait(END_S)
        atexit.unregister(self.stop)

    @property
    def is_stopped(self) -> bool:
        """By `stop`, before its load was over."""
        return self._stopped

    def wait(self, timeout_s: float | None = None) -> None:
        """For the end. RuntimeError when it takes longer."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise RuntimeError(f"the engine did not end within {timeout_s:g} s; restart the kernel.")

    def _run(self) -> None:
        try:
            with InProcessClient(self._config, observer=self._recorder) as client:
                self.num_blocks = client.info.num_blocks
                if self._load.longest > (limit := client.info.max_model_len):
                    raise ValueError(
                        f"load {self._load.name} holds {self._load.longest} tokens in a sequence, longer than "
                        f"max_model_len={limit}; make its prompts or answers shorter."
                    )
                drive(client, warm_up(self._load), sleep=self._sleep, on_tokens=self._on_tokens)
                self._first = len(self._recorder.records)
                drive(client, self._load, sleep=self._sleep, on_tokens=self._on_tokens)
        except _Stopped:
            self._stopped = True
        except Exception as error:  # a thread has nobody to raise it to
            self.error = error
        finally:
            self.done.set()

    def _sleep(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise _Stopped

    def _on_tokens(self, _: int) -> None:
        self._sleep(0)


class LiveView:
    """Show it as the last line of a cell, where the engine then runs. `draw(records)` is the picture of a run so
    far; `engine` is there once it was shown."""

    def __init__(self, config: EngineConfig, load: Workload, setting: Setting) -> None:
        self.engine: LiveEngine | None = None
        self._config, self._load, self._setting = config, load, setting

    def draw(self, records: list[StepRecord], num_blocks: int, is_stopped: bool = False) -> Figure:
        return live_picture(records, num_blocks, self._setting, is_stopped)

    def stop(self) -> None:
        """End the run that is under way, if there is one."""
        if self.engine is not None:
            self.engine.stop()

    def _ipython_display_(self) -> None:
        self.stop()
        engine = self.engine = LiveEngine(self._config, self._load)
        if not has_front_end():
            engine.wait()
            self._raise(engine)
            Picture(self.draw(engine.records, engine.num_blocks))
            return
        picture = Picture(self.draw([], engine.num_blocks))
        follow = (engine, picture, self._show_button(engine))
        threading.Thread(target=self._follow, args=follow, name="live-view", daemon=True).start()

    def _follow(self, engine: LiveEngine, picture: Picture, button: Any) -> None:
        is_over = False
        while not is_over:
            is_over = engine.done.wait(PERIOD_S)
            picture.replace(self.draw(engine.records, engine.num_blocks, engine.is_stopped))
        button.disabled, button.description = True, "stopped" if engine.is_stopped else "over"
        self._raise(engine)

    def _show_button(self, engine: LiveEngine) -> Any:
        """There is nothing to stop once the run is over: the button then says so."""
        import ipywidgets
        from IPython.display import display

        button: Any = ipywidgets.Button(description="stop")
        button.on_click(lambda _: engine.stop())
        display(button)
        return button

    def _raise(self, engine: LiveEngine) -> None:
        if engine.error is not None:
            raise engine.error


def live_view(config: EngineConfig, load: Workload, setting: Setting) -> LiveView:
    """That load on an engine of that config, whatever its client, in this process. `setting` goes into the title."""
    return LiveView(config, load, setting)
