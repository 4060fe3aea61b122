"""The page in a headless browser: a conversation, its colours, the tree, the numbers, the keyboard. Each test fails on any console message."""

import json
import re

import pytest

from tests.server.fakes import ENDLESS

LONG = "Tell me about the sea, the ships on it and the people who live by it, and do not leave out the whales and the storms."


def ask(page, text):
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def wait_answers(page, number):
    """Until so many answers are complete."""
    page.wait_for_function(
        "number => document.querySelectorAll('.facts').length === number && !document.querySelector('#send').disabled",
        arg=number,
        timeout=60_000,
    )


def talk(page, text):
    number = page.locator(".facts").count()
    ask(page, text)
    wait_answers(page, number + 1)
    return page.locator(".message.assistant").last


def kinds(locator):
    names = [
        set(name.split()) for name in locator.locator(".token").evaluate_all("all => all.map(one => one.className)")
    ]
    return [(name & {"cached", "prefilled", "drawn", "accepted", "corrected"}).pop() for name in names]


def setting(page, name, value):
    page.fill(f"#settings [name={name}]", str(value))


def number(text):
    return float(re.sub(r"[^\d.]", "", text))


def test_an_answer_streams_with_the_colours_of_its_steps(server, visit):
    page = visit(server)
    setting(page, "temperature", 0)
    answer = talk(page, LONG)
    prompt = kinds(answer.locator(".prompt-tokens"))
    drawn = kinds(answer.locator(".answer-tokens"))
    assert len(prompt) > 20
    assert set(prompt) <= {"cached", "prefilled"}
    name = page.evaluate("() => import('./ui/chat.js').then(chat => chat.last.name)")
    (request,) = server.post("/ui/api/requests", {"name": name})[2]["requests"]
    assert prompt.count("cached") == request["num_cached_tokens"]
    wanted = []
    for step in request["steps"]:
        if step["num_drawn"]:
            wanted += ["accepted"] * step["num_accepted"]
            wanted.append("corrected" if step["num_accepted"] < step["num_drafts"] else "drawn")
    assert drawn == wanted[: len(drawn)]
    assert "accepted" in drawn
    assert "ended:" in answer.locator(".facts").inner_text()


def test_the_next_turn_comes_from_the_cache_and_the_tree_has_grown(server, visit):
    page = visit(server)
    setting(page, "cache_salt", "two turns")
    setting(page, "seed", 7)
    talk(page, LONG)
    page.click("#tab-cache")
    page.wait_for_selector(".span")
    before = page.locator(".span").count()
    page.click("#tab-chat")
    answer = talk(page, "And what do they eat?")
    assert kinds(answer.locator(".prompt-tokens")).count("cached") > 16
    page.click("#tab-cache")
    page.wait_for_function("before => document.querySelectorAll('.span').length > before", arg=before)
    page.wait_for_selector(".mark.attached")
    assert "Your last request resumed at token" in page.inner_text("#told")


def test_stop_ends_the_request_and_keeps_what_was_drawn(start, visit):
    server = start()
    page = visit(server)
    page.route("**/tokenize", lambda route: route.fulfill(json=endless_prompt()))
    ask(page, "go on for ever")
    page.wait_for_function("() => document.querySelectorAll('.answer-tokens .token').length > 3")
    assert server.stat("num_aborted") == 0
    page.click("#stop")
    wait_answers(page, 1)
    assert "ended: stopped" in page.inner_text(".facts")
    server.until(lambda: server.stat("num_aborted") == 1)


def test_a_page_can_be_used_while_more_tokens_come_than_it_can_show(server, visit):
    """All at once: nothing waits for the server between them."""
    num_tokens = 20_000
    choice = {
        "token_ids": [5],
        "logprobs": {"tokens": ["a "], "token_logprobs": [-1.0], "top_logprobs": [{"a ": -1.0}]},
    }
    event = "data: " + json.dumps({"id": "cmpl-many", "choices": [choice | {"finish_reason": None}]}) + "\n\n"
    page = visit(server)
    page.route(
        "**/v1/completions", lambda route: route.fulfill(body=event * num_tokens, content_type="text/event-stream")
    )
    # As soon as anything else has its turn.
    page.evaluate(
        "setInterval(() => document.querySelector('.answer-tokens .token') && document.querySelector('#stop').click(), 1)"
    )
    ask(page, "as many as there are")
    wait_answers(page, 1)
    assert "ended: stopped" in page.inner_text(".facts")
    assert page.locator(".answer-tokens .token").count() < num_tokens


def endless_prompt():
    return {"count": 1, "max_model_len": 4096, "tokens": [ENDLESS], "token_strs": ["x"]}


def test_a_token_shows_what_was_near(server, visit):
    page = visit(server)
    answer = talk(page, LONG)
    answer.locator(".answer-tokens .token:visible").first.hover()
    page.wait_for_selector("#popover:not([hidden])")
    assert page.locator("#popover .tops li").count() >= 5
    assert page.locator("#popover .tops li.chosen").count() == 1


def test_a_refusal_is_told(server, visit):
    page = visit(server)
    setting(page, "top_k", -7)
    ask(page, "hello")
    page.wait_for_selector("[role=alert]")
    assert "top_k" in page.inner_text("[role=alert]")
    assert page.locator(".message.assistant").count() == 0
    page.watch.said = [said for said in page.watch.said if "status of 400" not in said]


def test_the_dashboard_shows_the_numbers_of_the_metrics(server, visit):
    page = visit(server)
    talk(page, LONG)
    page.click("#tab-dashboard")
    page.wait_for_selector("[data-metric]")
    server.until(lambda: server.stat("num_running") == 0)
    text = server.get("/metrics")[2]
    metrics = dict(re.findall(r'^(\S+)\{model_name="nano"\} (\S+)$', text, re.MULTILINE))
    totals = [name for name in metrics if name.endswith("_total")]
    page.wait_for_function(
        "([name, value]) => document.querySelector(`[data-metric='${name}']`).textContent.replaceAll(',', '') === value",
        arg=["samebit:generation_tokens_total", f"{float(metrics['samebit:generation_tokens_total']):.0f}"],
    )
    shown = page.evaluate(
        "() => [...document.querySelectorAll('[data-metric]')].map(one => [one.dataset.metric, one.textContent])"
    )
    assert {name for name, _ in shown} <= set(metrics)
    assert len({name for name, _ in shown} & set(totals)) >= 10
    for name, value in shown:
        if name in totals:
            assert number(value) == float(metrics[name]), name
    rows = float(metrics["samebit:spec_decode_num_drafts_total"])
    accepted = re.findall(r'per_pos_total\{model_name="nano",position="\d"\} (\S+)', text)
    bars = page.locator("#dashboard section", has_text="Acceptance by position").locator("[data-value]")
    assert bars.evaluate_all("all => all.map(one => Number(one.dataset.value))") == [float(one) for one in accepted]
    assert number(bars.first.inner_text()) == pytest.approx(100 * float(accepted[0]) / rows, abs=0.6)


def test_a_request_opens_into_its_steps_and_is_saved_as_a_trace(server, visit):
    page = visit(server)
    talk(page, LONG)
    page.click("text=Steps")
    page.wait_for_selector("#requests table tbody tr")
    assert page.locator("#requests tbody tr.prefill").count() >= 1
    assert page.locator("#requests tbody tr.verify").count() >= 1
    page.wait_for_selector("#requests .request .strip i.prefill")
    with page.expect_download() as download:
        page.click("text=Trace of this request")
    events = json.loads(download.value.path().read_text())["traceEvents"]
    assert {"queue", "prefill", "verify"} <= {event["name"] for event in events}


def test_everything_is_reached_with_the_keyboard(server, visit):
    page = visit(server)
    page.focus("#prompt")
    page.keyboard.type("Hello there, who are you and what can you do for me today?")
    page.keyboard.press("Enter")
    wait_answers(page, 1)
    page.locator(".answer-tokens").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#popover").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("#popover").is_visible()
    page.focus("#tab-chat")
    for name in ("dashboard", "cache", "requests"):
        page.keyboard.press("ArrowRight")
        assert page.locator(f"#{name}").is_visible()
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector(".span")
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("() => document.activeElement.classList.contains('span')"):
            break
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert page.locator(".span.chosen").count() == 1
    focusable = "a[href], button, input, textarea, summary, [tabindex]"
    unnamed = page.evaluate(
        """selector => [...document.querySelectorAll(selector)].filter(one => one.checkVisibility() &&
            !one.textContent.trim() && !one.getAttribute('aria-label') && !one.labels?.length).map(one => one.outerHTML)""",
        focusable,
    )
    assert unnamed == []


def test_the_operator_can_empty_the_cache(server, visit):
    page = visit(server)
    talk(page, LONG)
    page.click("#tab-cache")
    page.wait_for_selector(".span")
    page.click("text=Empty the cache")
    page.wait_for_selector("text=The cache is empty.")
    assert server.post("/ui/api/cache", {})[2]["spans"] == []


def test_a_server_with_a_key_asks_for_it_and_keeps_it_in_the_tab(start, visit):
    server = start(api_keys=("sesame",))
    page = visit(server)
    page.wait_for_selector("#key-dialog[open]")
    assert page.inner_text("#model") == ""
    page.fill("#key", "sesame")
    page.press("#key", "Enter")
    page.wait_for_selector("#status[data-state=live]")
    page.reload()
    page.wait_for_selector("#status[data-state=live]")
    assert not page.locator("#key-dialog").is_visible()
    page.click("#tab-cache")
    page.wait_for_selector("#told, #cache .hint, #cache .error")
    assert not page.locator("text=Empty the cache").is_visible()
    assert "sesame" not in json.dumps(page.evaluate("() => ({...localStorage})"))
    # The browser reports what was refused for want of a key.
    assert all("401" in said for said in page.watch.said)
    page.watch.said = []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1200])
def test_nothing_runs_over_the_edge_and_text_can_be_read(server, visit, scheme, width):
    page = visit(server, color_scheme=scheme, viewport={"width": width, "height": 740})
    talk(page, LONG)
    for name in ("chat", "dashboard", "cache", "requests"):
        page.click(f"#tab-{name}")
        page.wait_for_timeout(300)
        assert page.evaluate("() => document.scrollingElement.scrollWidth") <= width, name
        assert page.evaluate("() => document.querySelector('main').scrollWidth") <= width, name
        assert page.evaluate(CONTRAST) == [], name


def test_the_theme_is_the_systems_until_it_is_chosen(server, visit):
    page = visit(server, color_scheme="dark")
    ground = "() => getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(ground)
    page.click("#theme-button")
    light = page.evaluate(ground)
    assert light != dark
    page.reload()
    assert page.evaluate(ground) == light
    page.click("#theme-button")
    assert page.evaluate(ground) == dark


# Elements with text of their own whose colour is too near to that behind them (WCAG AA: 4.5, 3 for large text).
CONTRAST = """() => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const numbers = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = ([red, green, blue]) => [red, green, blue].map((value) => value / 255)
    .map((value) => (value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4))
    .reduce((sum, value, place) => sum + value * [0.2126, 0.7152, 0.0722][place], 0);
  const behind = (one) => {
    for (let at = one; at; at = at.parentElement) {
      const found = numbers(getComputedStyle(at).backgroundColor);
      if (found[3] === 255) return found;
    }
    return [255, 255, 255, 255];
  };
  const bad = [];
  for (const one of document.querySelectorAll('body *')) {
    const hasText = [...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!hasText || !one.checkVisibility() || one.disabled || one.matches('script, noscript, option, .skip')) continue;
    const style = getComputedStyle(one);
    const [front, back] = [light(numbers(style.color)), light(behind(one))];
    const ratio = (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05);
    const needed = parseFloat(style.fontSize) >= 18.6 ? 3 : 4.5;
    if (ratio < needed) bad.push(`${one.className} ${one.textContent.slice(0, 20)}: ${ratio.toFixed(2)}`);
  }
  return bad;
}"""
