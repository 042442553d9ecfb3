"""Laws of the page at `/`, seen by a real browser on a real server. `make test-ui`; pictures go to tmp_path."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect
from serve_process import ServeProcess

from nanoserve.api.cli_serve import ENGINE_DIED

pytestmark = pytest.mark.needs_chromium

PROMPT = "Once upon a time there was a little fox who lived near the old barn and liked to play with a ball."
SIZES = {"wide": (1280, 800), "narrow": (390, 844)}
WAIT_MS = 20_000
MIN_CONTRAST = 4.5  # WCAG AA, for text of this size

# Notes every length that the last answer has had, and every value of `running`.
WATCH = """() => {
  window.seen = { lengths: [], running: [] };
  const note = () => {
    const answer = [...document.querySelectorAll("article p")].at(-1)?.textContent.length ?? 0;
    const running = document.getElementById("running").textContent;
    if (seen.lengths.at(-1) !== answer) seen.lengths.push(answer);
    if (seen.running.at(-1) !== running) seen.running.push(running);
  };
  new MutationObserver(note).observe(document.body, { subtree: true, childList: true, characterData: true });
}"""

# The contrast of every visible text with what is behind it, lowest first: [ratio, text].
CONTRASTS = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return canvas.getImageData(0, 0, 1, 1).data;
  };
  const light = (color) => {
    const linear = (v) => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
    const [r, g, b] = [...rgba(color)].map((v) => linear(v / 255));
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = getComputedStyle(at).backgroundColor;
      if (rgba(color)[3] === 255) return color;
    }
    return "white";
  };
  const says = (element) => element.matches("input, textarea, select") ||
    [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());
  const texts = [...document.querySelectorAll("body *")].filter((element) =>
    element.checkVisibility() && !element.closest(".hidden, script") && !element.disabled && says(element));
  return texts.map((element) => {
    const [a, b] = [light(getComputedStyle(element).color), light(behind(element))];
    return [(Math.max(a, b) + .05) / (Math.min(a, b) + .05), element.outerHTML.slice(0, 80)];
  }).sort((a, b) => a[0] - b[0]);
}"""


@contextmanager
def opened(browser: Browser, server: ServeProcess, size: str = "wide", scheme: Any = "light") -> Iterator[Page]:
    """The page, once it has heard from the engine. No script of it may fail, and it may ask nobody but its server."""
    width, height = SIZES[size]
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    try:
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        asked: list[str] = []
        failures: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: failures.append(str(error)))
        page.goto(server.url, wait_until="commit")
        expect(page.locator("#running")).to_have_text(re.compile(r"^\d+ of \d+$"), timeout=WAIT_MS)
        yield page
        assert failures == []
        assert len(asked) >= 2
        strangers = [url for url in asked if not url.startswith((f"{server.url}/", "data:"))]
        assert strangers == []
    finally:
        context.close()


def send(page: Page, prompt: str, max_tokens: int = 120, mode: str = "completion") -> None:
    page.select_option("#mode", mode)
    page.fill("#max-tokens", str(max_tokens))
    page.fill("#temperature", "0")
    page.fill("#prompt", prompt)
    page.click("#send")


def send_endless(page: Page, max_tokens: int = 1900) -> None:
    """A prompt whose answer takes seconds: it goes on behind the end of its story."""

    def without_end(route: Route) -> None:
        route.continue_(post_data={**route.request.post_data_json, "ignore_eos": True})

    page.route("**/v1/completions", without_end, times=1)
    send(page, PROMPT, max_tokens)
    expect(page.locator("#running")).to_have_text(re.compile("^1 of"), timeout=WAIT_MS)


def until_answered(page: Page) -> str:
    """The figures of the last answer."""
    expect(page.locator("#status")).to_have_text("the answer is complete", timeout=WAIT_MS)
    return page.locator("article footer").last.inner_text()


def cached_tokens(figures: str) -> int:
    found = re.search(r"(\d+) of (\d+) prompt tokens cached", figures)
    assert found, figures
    assert int(found[1]) < int(found[2])
    return int(found[1])


def check_layout(page: Page) -> None:
    """Nothing is wider than the window, and everything can be read."""
    wide, window = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert wide <= window, f"the page is {wide} wide, the window {window}"
    contrasts = page.evaluate(CONTRASTS)
    assert len(contrasts) > 10
    assert contrasts[0][0] >= MIN_CONTRAST, contrasts[:3]


def test_an_answer_streams_in_with_its_figures_and_the_batch_moves(
    browser: Browser, server: ServeProcess, tmp_path: Path
) -> None:
    with opened(browser, server) as page:
        page.evaluate(WATCH)
        send_endless(page, max_tokens=700)
        page.screenshot(path=tmp_path / "streaming.png")
        figures = until_answered(page)
        expect(page.locator("#running")).to_have_text(re.compile("^0 of"), timeout=WAIT_MS)
        seen = page.evaluate("seen")
        assert len(seen["lengths"]) > 20, "text comes token by token"
        assert seen["lengths"] == sorted(seen["lengths"]), "text only grows"
        assert [value.split()[0] for value in seen["running"]][-2:] == ["1", "0"]
        assert re.search(r"TTFT \d+ ms", figures), figures
        assert re.search(r"\d+ tok/s", figures), figures
        assert cached_tokens(figures) == 0

        send(page, PROMPT)
        expect(page.locator("article")).to_have_count(2)
        assert cached_tokens(until_answered(page)) >= 16
        first, second = (page.locator("article p").nth(i).inner_text() for i in (0, 1))
        assert first.startswith(second), "the same prompt, greedily"
        expect(page.locator("#hits")).to_have_text(re.compile(r"^[1-9]\d* %$"), timeout=WAIT_MS)


def test_a_conversation_goes_on_and_enter_sends(browser: Browser, server: ServeProcess) -> None:
    with opened(browser, server) as page:
        send(page, "Tell me about a dog.", max_tokens=20, mode="chat")
        until_answered(page)
        with page.expect_request("**/v1/chat/completions") as asked:
            page.fill("#prompt", "And a cat?")
            page.press("#prompt", "Enter")
        roles = [message["role"] for message in asked.value.post_data_json["messages"]]
        assert roles == ["user", "assistant", "user"]
        until_answered(page)
        expect(page.locator("article")).to_have_count(4)
        page.click("#clear")
        expect(page.locator("article")).to_have_count(0)


def test_stop_ends_the_answer_here_and_in_the_engine(browser: Browser, server: ServeProcess) -> None:
    with opened(browser, server) as page:
        send_endless(page)
        page.click("#stop")
        expect(page.locator("article footer")).to_contain_text("stopped", timeout=WAIT_MS)
        expect(page.locator("#running")).to_have_text(re.compile("^0 of"), timeout=WAIT_MS)
        expect(page.locator("#send")).to_be_enabled()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_the_page_fits_and_is_legible(
    browser: Browser, server: ServeProcess, tmp_path: Path, size: str, scheme: str
) -> None:
    with opened(browser, server, size, scheme) as page:
        check_layout(page)
        page.screenshot(path=tmp_path / f"{size}-{scheme}-empty.png")
        send(page, PROMPT, max_tokens=60)
        until_answered(page)
        send(page, "an_unbroken_word_" * 20, max_tokens=60, mode="chat")
        until_answered(page)
        send(page, PROMPT, max_tokens=10**6)
        expect(page.locator("article .error, #max-tokens:invalid").first).to_be_visible(timeout=WAIT_MS)
        check_layout(page)
        page.screenshot(path=tmp_path / f"{size}-{scheme}.png")
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        shades = [int(value) for value in re.findall(r"\d+", background)]
        assert (min(shades) > 200) if scheme == "light" else (max(shades) < 60), background


def test_a_page_that_is_too_wide_or_too_pale_is_seen(browser: Browser, server: ServeProcess) -> None:
    with opened(browser, server, "narrow") as page:
        page.evaluate("document.querySelector('textarea').style.width = '500px'")  # planted
        with pytest.raises(AssertionError, match="the window 390"):
            check_layout(page)
        page.evaluate("document.querySelector('textarea').style.width = ''")
        page.evaluate("document.querySelector('dt').style.color = '#aaa'")  # planted
        with pytest.raises(AssertionError, match="running"):
            check_layout(page)


def test_a_server_that_is_gone_is_said_in_plain_words(
    browser: Browser, doomed_server: ServeProcess, tmp_path: Path
) -> None:
    with opened(browser, doomed_server) as page:
        send_endless(page)
        doomed_server.kill()
        error = page.locator("article .error")
        expect(error.last).to_contain_text("the connection to the server was lost", timeout=WAIT_MS)
        send(page, PROMPT)
        expect(error.last).to_contain_text("the server cannot be reached", timeout=WAIT_MS)
        expect(page.locator("#running")).to_have_text("–")
        page.screenshot(path=tmp_path / "gone.png")
        check_layout(page)


def test_a_dead_engine_is_said_in_plain_words(browser: Browser, doomed_server: ServeProcess) -> None:
    with opened(browser, doomed_server) as page:
        send_endless(page)
        (core,) = doomed_server.pids()[1:]
        os.kill(core, signal.SIGKILL)
        doomed_server.exit_code = ENGINE_DIED
        expect(page.locator("article .error")).to_contain_text("SIGKILL", timeout=WAIT_MS)
