"""Takes the pictures of docs/page.md: `python -m tests.ui.screenshots URL CHROMIUM`, of a server with the bundled model just started."""

import io
import json
import sys
import urllib.request
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

IMAGES = Path(__file__).parents[2] / "docs" / "images"
LIBRARY = "You answer for a library, in one short sentence, and you are polite to everyone who asks you about books."
QUESTIONS = ("Where are the maps?", "Which book is about whales?", "Who wrote Frankenstein, and when was it printed?")
STORY = "My name is Ada, I live in Lisbon with a cat called Turing, and I collect maps of the sea."


def post(url, body):
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def fill_cache(url):
    """Conversations that share a beginning, and one of another tenant."""
    for question in QUESTIONS:
        messages = [{"role": "system", "content": LIBRARY}, {"role": "user", "content": question}]
        asked = {"max_tokens": 40, "seed": 3, "return_token_ids": True}
        answer = post(f"{url}/v1/chat/completions", {"messages": messages, **asked})
        messages.append({"role": "assistant", "token_ids": answer["choices"][0]["token_ids"]})
        messages.append({"role": "user", "content": "Thank you. Is it open on Sunday?"})
        post(f"{url}/v1/chat/completions", {"messages": messages, **asked})
    post(f"{url}/v1/chat/completions", {"messages": messages, "cache_salt": "another", **asked})


def talk(page):
    if not page.locator("[name=seed]").is_visible():
        page.click("#settings-box > summary")
    page.fill("[name=seed]", "5")
    for number, text in enumerate((STORY, "What is my name, where do I live, and what do I collect?"), start=1):
        page.fill("#prompt", text)
        page.press("#prompt", "Enter")
        page.wait_for_function("number => document.querySelectorAll('.facts').length === number", arg=number)
    if page.viewport_size["width"] < 900:
        page.click("#settings-box > summary")
    page.locator("details.prompt summary").last.click()


def shoot(browser, url, suffix, views, **options):
    page = browser.new_context(**options).new_page()
    page.goto(f"{url}/")
    talk(page)
    page.locator(".answer-tokens").last.locator(".token:visible").nth(1).hover()
    for name in views:
        if name != "chat":
            page.click(f"#tab-{name}")
            page.wait_for_timeout(2500)
        if name == "cache":
            page.locator(".span").first.click()
            page.mouse.move(0, 0)
        picture = Image.open(io.BytesIO(page.screenshot()))
        picture.convert("RGB").quantize(128).save(IMAGES / f"page-{name}{suffix}.png", optimize=True)


def main(url, chromium):
    IMAGES.mkdir(exist_ok=True)
    fill_cache(url)
    views = ("chat", "dashboard", "cache", "requests")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        desktop = {"viewport": {"width": 1100, "height": 720}}
        phone = {"viewport": {"width": 390, "height": 720}, "has_touch": True}
        shoot(browser, url, "", views, color_scheme="light", **desktop)
        shoot(browser, url, "-dark", ("chat", "cache"), color_scheme="dark", **desktop)
        shoot(browser, url, "-phone", ("chat", "requests"), color_scheme="dark", **phone)
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
