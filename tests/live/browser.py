"""A headless Chromium, driven over WebDriver (w3.org/TR/webdriver2), which chromedriver speaks as plain HTTP."""

import base64
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-component-update",
    "--disable-background-networking", "--disable-sync", "--disable-dev-shm-usage", "--js-flags=--expose-gc",
]  # fmt: skip


class Browser:
    def __init__(self, address: str) -> None:
        self._address, self._opener = address, build_opener(ProxyHandler({}))
        options = {"binary": CHROMIUM, "args": FLAGS}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        made = self._ask("/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{made['sessionId']}"

    def _ask(self, path: str, body: dict[str, Any] | None = None, method: str | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        with self._opener.open(Request(self._address + path, data, method=method), timeout=30) as answer:
            return json.loads(answer.read())["value"]

    def open(self, address: str, width: int = 1300, height: int = 1500) -> None:
        self._ask(f"{self._session}/window/rect", {"width": width, "height": height})
        self._ask(f"{self._session}/url", {"url": address})

    def says(self, script: str) -> Any:
        """What a function of this body returns on the page."""
        return self._ask(f"{self._session}/execute/sync", {"script": script, "args": []})

    def wait(self, script: str, accepted: Callable[[Any], bool] = bool, timeout_s: float = 20.0) -> Any:
        deadline = time.monotonic() + timeout_s
        while not accepted(found := self.says(script)):
            assert time.monotonic() < deadline, f"{script}: {found!r}; {self.log()}"
            time.sleep(0.05)
        return found

    def log(self) -> list[str]:
        """What the console has said."""
        return [entry["message"] for entry in self._ask(f"{self._session}/se/log", {"type": "browser"})]

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._ask(f"{self._session}/screenshot")))

    def quit(self) -> None:
        self._ask(self._session, method="DELETE")


@contextmanager
def browser() -> Iterator[Browser]:
    assert DRIVER is not None
    driver = subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, text=True)
    try:
        assert driver.stdout is not None
        line = next(line for line in driver.stdout if "started successfully on port" in line)
        made = Browser(f"http://127.0.0.1:{line.rpartition('port ')[2].strip().rstrip('.')}")
        try:
            yield made
        finally:
            made.quit()
    finally:
        driver.kill()
        driver.wait()
