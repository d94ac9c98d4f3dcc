"""The HTML page: what is in it, how it is written, and how it behaves in a browser."""

import base64
import gzip
import html.parser
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import WIDTH, Classifier, Plain, Scaled, data, stack, trainer
from torch import nn

from lit_resinit import GradientError, History, ResidualInit, ResInitError, ResInitWarning, apply_, make_plan, observe
from lit_resinit.report import about_run, write_page
from lit_resinit.report import page as page_module
from lit_resinit.report.page import LivePage, page, page_data

X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))


def history_of(branches: int, records: int) -> History:
    """Branch i opens at a speed of its own; the last one never does."""
    history = History([f"blocks.{i}" for i in range(branches)])
    speed = torch.linspace(1.0, 0.0, branches)
    for record in range(records):
        gate = 0.01 * record * speed
        history.append(
            10 * record, torch.stack([gate, gate, speed, speed]), torch.full((branches,), 2.0), gate.square()
        )
    return history


def content(text: str) -> dict[str, Any]:
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1], parse_constant=pytest.fail)


# -------------------------------------------------------------------- what is in it


def test_data_are_those_of_the_history() -> None:
    history = history_of(5, 30)
    found = content(page(history))
    assert found["steps"] == history.steps.tolist()
    for key, quantity in (("ratio", "variance_ratio"), ("g", "gate_max"), ("grad", "gate_grad")):
        torch.testing.assert_close(torch.tensor(found[key]), getattr(history, quantity).T, rtol=1e-3, atol=0.0)
    assert found["stream"]["first"] == found["stream"]["last"] == [2.0] * 5
    assert {b["name"]: b["on"] for b in found["branches"]} == history.switched_on()
    assert [b["order"] for b in found["branches"]] == [1, 2, 3, 4, None]
    assert "Never: blocks.4." in found["notes"]["order"]


def test_plan_verdicts_and_waking_steps_are_in_it() -> None:
    model = stack(Scaled, 3)
    plan = make_plan(model, X)
    apply_(model, plan)
    with observe(model, plan, X) as seen:
        model(X).square().mean().backward()
    about = about_run(plan, seen.identity, seen.gradients, {"1.scale": 2})
    found = content(page(History([b.name for b in plan.branches]), about))
    assert found["plan"] == str(plan)
    texts = dict(found["verdicts"])
    assert str(seen.identity) in texts.values()
    assert str(seen.gradients) in texts.values()
    assert "1.scale after 2" in texts.values()
    assert [(b["gate"], b["kind"], b["status"], b["woke"]) for b in found["branches"]] == [
        ("0.scale", "scale", "alive", None),
        ("1.scale", "scale", "alive", 2),
        ("2.scale", "scale", "alive", None),
    ]


def test_many_branches_stay_small_and_keep_both_ends(tmp_path: Path) -> None:
    history = history_of(1000, 2000)
    write_page(tmp_path / "run.html", history)
    assert (tmp_path / "run.html").stat().st_size < 6e6
    found = content((tmp_path / "run.html").read_text())
    assert (found["steps"][0], found["steps"][-1]) == (0, 19990)
    assert len(found["branches"]) == 1000
    assert len(found["ratio"]) == 1000
    assert f"{len(found['steps'])} of 2,000 records" in found["notes"]["map"]


def test_more_rows_than_a_screen_has_are_thinned_evenly() -> None:
    found = page_data(history_of(3000, 3), about_run(None))
    assert (found["rows"][0], found["rows"][-1], len(found["rows"])) == (0, 2999, 1000)
    assert len(found["branches"]) == 3000
    assert "1,000 of 3,000 branches" in found["notes"]["map"]


def test_numbers_that_json_does_not_know_are_null() -> None:
    history = History(["a", "b"])
    history.append(0, torch.full((4, 2), torch.nan), torch.tensor([0.0, torch.inf]), torch.ones(2))
    found = content(page(history))
    assert found["ratio"][0] == [None]
    assert found["stream"]["first"] == [0.0, None]


def test_plotly_is_in_it_once_with_its_licence_and_nothing_is_fetched() -> None:
    text = page(history_of(2, 2))
    plotly = gzip.decompress(base64.b64decode(re.search(r'id="plotly">(.*?)</script>', text)[1])).decode()
    assert "newPlot" in plotly
    assert text.count("MIT license") == 1
    parser = html.parser.HTMLParser()
    fetched = []
    parser.handle_starttag = lambda tag, attributes: fetched.extend(  # type: ignore[method-assign]
        value for name, value in attributes if name in ("src", "href") and not value.startswith("data:")
    )
    parser.feed(text)
    assert fetched == []


def test_names_cannot_leave_the_data() -> None:
    name = "</script><script>document.title='broken'</script>"
    text = page(History([name]))
    assert name not in text
    assert content(text)["branches"][0]["name"] == name


def test_missing_plotly_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ResInitError, match=r"lit-resinit\[report\]"):
        page(history_of(2, 2))


def test_the_verdict_is_one_sentence_with_a_tone() -> None:
    history = history_of(2, 3)
    branch = {"skip": "", "action": "zero", "kind": "", "gate": "g", "woke": None}

    def verdict(state: str = "running", start: str = "proven", **statuses: str) -> list[str]:
        branches = {f"blocks.{i}": branch | {"status": status} for i, status in enumerate(statuses.values())}
        return page_data(history, about_run(None) | {"start": start, "branches": branches}, state)["verdict"]

    assert verdict() == ["wait", "No gate was judged."]
    assert verdict(a="alive", b="alive") == ["good", "It starts as the identity, and every gate learns."]
    assert verdict(a="alive", b="asleep")[0] == "wait"
    assert verdict(a="alive", b="dead") == [
        "bad",
        "1 of 2 branches in trouble: blocks.1. The verdicts say why.",
    ]
    assert verdict(a="alive", start="broken")[0] == "bad"
    assert verdict("stopped by KeyboardInterrupt at step 3, written now", a="alive") == [
        "bad",
        "The run was stopped by KeyboardInterrupt at step 3.",
    ]


def test_a_branch_that_fell_back_below_the_bound_is_told_from_one_that_stayed_on() -> None:
    history = History(["stays", "falls", "never"])
    for step, ratios in enumerate(([0.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.5, 1e-6, 0.0])):
        history.append(step, torch.zeros(4, 3), torch.ones(3), torch.tensor(ratios))
    found = {b["name"]: b["now"] for b in page_data(history, about_run(None))["branches"]}
    assert found == {"stays": "on", "falls": "off again", "never": "off"}


def test_what_is_needed_to_repeat_the_run_is_in_it(tmp_path: Path) -> None:
    callback = ResidualInit(report=str(tmp_path / "run.html"), scheme="insert", patience=5)
    trainer(tmp_path, callback).fit(Classifier(stack(Plain)), data(WIDTH))
    found = dict(content((tmp_path / "run.html").read_text())["setting"])
    assert (found["scheme"], found["patience"], found["torch"]) == ("insert", "5", torch.__version__.split("+")[0])
    assert "seed" in found


# -------------------------------------------------------------------- writing it


def test_a_page_is_rewritten_only_after_a_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(page_module.time, "monotonic", lambda: clock[0])
    live = LivePage(tmp_path / "run.html")
    assert live.due
    live.write(history_of(2, 1), about_run(None), "running")
    assert not live.due
    clock[0] += 6.0
    assert live.due


def test_a_slow_page_waits_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def tick() -> float:
        clock[0] += 1.0  # each look at the clock is a second later: writing takes one
        return clock[0]

    live = LivePage(tmp_path / "run.html")
    monkeypatch.setattr(page_module.time, "monotonic", tick)
    live.write(history_of(2, 1), about_run(None), "running")
    clock[0] += 90.0
    assert not live.due
    clock[0] += 10.0
    assert live.due


def test_a_running_page_asks_the_browser_to_look_again_and_a_finished_one_does_not(tmp_path: Path) -> None:
    live = LivePage(tmp_path / "run.html")
    live.write(history_of(2, 1), about_run(None), "running")
    assert 'http-equiv="refresh"' in live.path.read_text()
    live.write(history_of(2, 1), about_run(None), "finished", last=True)
    assert 'http-equiv="refresh"' not in live.path.read_text()


def test_a_run_writes_its_page_from_the_first_record_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_module, "_PAUSE", 0.0)
    monkeypatch.setattr(page_module, "_SHARE", 1e9)
    states = []

    class Reader(ResidualInit):
        def _follow(self, *args: Any, **kwargs: Any) -> None:
            super()._follow(*args, **kwargs)
            states.append(content(Path(self.report).read_text())["state"].split(",")[0])

    callback = Reader(report=str(tmp_path / "run.html"), log_every_n_steps=2)
    trainer(tmp_path, callback, max_steps=4).fit(Classifier(stack(Scaled)), data(WIDTH))
    assert states[0] == "running at step 1"
    assert states[-1] == "finished at step 4"
    found = content((tmp_path / "run.html").read_text())
    assert found["steps"] == callback.history.steps.tolist()
    assert ["identity at the start", "proven"] in found["tiles"]


def test_a_stopped_run_says_what_stopped_it(tmp_path: Path) -> None:
    class Shut(Scaled):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.relu(self.scale * self.f(x))

    path = tmp_path / "run.html"
    callback = ResidualInit(report=str(path), scheme="observe", identity="ignore")
    with pytest.raises(GradientError):
        trainer(tmp_path, callback).fit(Classifier(nn.Sequential(Shut(value=0.0))), data(WIDTH))
    found = content(path.read_text())
    assert found["state"].startswith("stopped by GradientError at step 0")
    assert any("dead" in text for _, text in found["verdicts"])


def test_a_full_disk_does_not_stop_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(page_module, "replace_file", full)
    callback = ResidualInit(report=str(tmp_path / "run.html"))
    with pytest.warns(ResInitWarning, match="disk full"):
        trainer(tmp_path, callback).fit(Classifier(stack(Scaled)), data(WIDTH))
    assert len(callback.history)


# -------------------------------------------------------------------- in a browser


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as player:
        opened = player.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield opened
        opened.close()


def shown(browser: Any, path: Path, **options: Any) -> tuple[Any, list[str]]:
    """The page when its figures are drawn, and every complaint or request that it made."""
    tab = browser.new_context(**options).new_page()
    trouble: list[str] = []
    tab.on("console", lambda message: trouble.append(message.text))
    tab.on("pageerror", lambda error: trouble.append(str(error)))
    tab.on(
        "request",
        lambda request: trouble.append(request.url) if not request.url.startswith(("file:", "data:")) else None,
    )
    tab.goto(path.as_uri())
    tab.wait_for_selector("html[data-drawn]", state="attached", timeout=120_000)
    return tab, trouble


@pytest.fixture(scope="module")
def run_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "run.html"
    history = history_of(12, 30)
    about = about_run(None, usefulness={name: 0.1 * i for i, name in enumerate(history.branches)}) | {"plan": "a plan"}
    write_page(path, history, about, "finished")
    return path


@needs_browser
@pytest.mark.browser
def test_every_figure_is_drawn_without_network_or_complaint(browser: Any, run_page: Path) -> None:
    tab, trouble = shown(browser, run_page)
    assert trouble == []
    assert tab.locator(".js-plotly-plot").count() == 5
    assert tab.locator("#gates .scatterlayer .trace").count() == 12
    assert tab.locator("#stream .legendtext").all_text_contents() == ["step 0", "step 290"]
    assert tab.locator("#map .scatterlayer .point").count() == 10
    assert tab.locator("#trouble").is_hidden()


@needs_browser
@pytest.mark.browser
def test_who_carries_the_loss_is_drawn_where_it_was_measured(browser: Any, tmp_path: Path) -> None:
    history = history_of(12, 30)
    for step in range(0, 300, 60):
        history.attribute(step, {name: 0.01 * (i - 3) for i, name in enumerate(history.branches)}, 2.0, 0.3)
    write_page(tmp_path / "run.html", history)
    tab, trouble = shown(browser, tmp_path / "run.html")
    assert trouble == []
    assert tab.locator(".js-plotly-plot").count() == 7
    assert tab.locator("#path .scatterlayer .point").count() == 10
    assert tab.locator("#stack .scatterlayer .trace").count() == 12 + 3 + 2  # up, down, sum and joint effect
    assert tab.locator("#stack .shapelayer path").count() == 10
    assert tab.locator("#loss .legendtext").all_text_contents() == ["as it is", "all gates closed"]
    assert tab.locator("#table th").all_inner_texts()[-1] == "attribution"


@needs_browser
@pytest.mark.browser
def test_hovering_shows_block_step_and_values(browser: Any, run_page: Path) -> None:
    tab, _ = shown(browser, run_page)
    tab.locator("#map").scroll_into_view_if_needed()
    area = tab.locator("#map .nsewdrag").first.bounding_box()
    tab.mouse.move(area["x"] + area["width"] * 0.97, area["y"] + area["height"] * 0.97)
    tab.wait_for_selector("#map .hovertext")
    text = tab.locator("#map .hovertext").first.text_content()
    for part in ("blocks.0", "step 2", "variance ratio 0.0", "|g| 0.2", "gate gradient 1"):
        assert part in text


@needs_browser
@pytest.mark.browser
def test_the_table_sorts_both_ways_with_unknown_last_and_filters(browser: Any, run_page: Path) -> None:
    tab, _ = shown(browser, run_page)

    def names() -> list[str]:
        return tab.locator("#table tbody tr td:nth-child(2)").all_inner_texts()

    ordered = [f"blocks.{i}" for i in range(12)]
    assert names() == ordered
    tab.get_by_role("button", name="order").click()
    assert names() == ordered
    tab.get_by_role("button", name="order").click()
    assert names() == [*reversed(ordered[:10]), "blocks.10", "blocks.11"]
    assert tab.locator("#table th[data-key=order]").get_attribute("aria-sort") == "descending"
    tab.get_by_role("button", name="branch").click()
    assert names() == ordered
    tab.locator("#filter").fill("s.1")
    assert names() == ["blocks.1", "blocks.10", "blocks.11"]


@needs_browser
@pytest.mark.browser
def test_a_phone_shows_it_without_scrolling_sideways(browser: Any, run_page: Path) -> None:
    tab, trouble = shown(browser, run_page, viewport={"width": 390, "height": 844})
    assert trouble == []
    assert tab.evaluate("document.documentElement.scrollWidth") == 390
    assert all(tab.locator(f"#{name}").bounding_box()["width"] > 300 for name in ("map", "gates", "order", "stream"))


@needs_browser
@pytest.mark.browser
def test_dark_mode_has_light_words_on_dark_ground(browser: Any, run_page: Path) -> None:
    def brightness(scheme: str) -> tuple[float, float]:
        tab, _ = shown(browser, run_page, color_scheme=scheme)
        ground = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        words = tab.evaluate("getComputedStyle(document.querySelector('#map .xtitle')).fill")
        return tuple(sum(map(int, re.findall(r"\d+", c)[:3])) / 3 for c in (ground, words))

    ground, words = brightness("dark")
    assert words - ground > 120
    ground, words = brightness("light")
    assert ground - words > 120


@needs_browser
@pytest.mark.browser
def test_names_with_markup_are_shown_as_they_are(browser: Any, tmp_path: Path) -> None:
    name = "<img src=x onerror=document.title='broken'>"
    history = History([name])
    history.append(0, torch.ones(4, 1), torch.ones(1), torch.ones(1))
    write_page(tmp_path / "run.html", history)
    tab, trouble = shown(browser, tmp_path / "run.html")
    assert trouble == []
    assert tab.title() != "broken"
    assert tab.locator("#table tbody td").nth(1).inner_text() == name


@needs_browser
@pytest.mark.browser
def test_an_empty_history_has_words_in_place_of_figures(browser: Any, tmp_path: Path) -> None:
    write_page(tmp_path / "run.html", History(["a", "b"]))
    tab, trouble = shown(browser, tmp_path / "run.html")
    assert trouble == []
    assert tab.locator("#state").text_content() == "No record yet"
    assert tab.locator(".plot:visible").count() == 0


@needs_browser
@pytest.mark.browser
def test_a_row_is_found_in_the_map_and_a_dot_in_the_table(browser: Any, run_page: Path) -> None:
    tab, trouble = shown(browser, run_page)
    tab.locator("#table tbody tr").nth(4).click()
    assert tab.evaluate("document.querySelector('#map').layout.shapes[0].y0") == 4
    tab.locator("#filter").fill("no such block")
    assert tab.locator("#table tbody tr").count() == 0
    tab.evaluate("document.querySelector('#order').emit('plotly_click', {points: [{y: 7}]})")
    assert tab.locator("tr.chosen td").nth(1).text_content() == "blocks.7"
    assert trouble == []


@needs_browser
@pytest.mark.browser
def test_gates_can_be_drawn_in_powers_of_ten_and_with_their_gradients(browser: Any, run_page: Path) -> None:
    tab, trouble = shown(browser, run_page)
    axis = "document.querySelector('#gates').layout.yaxis"
    assert tab.evaluate(f"[{axis}.title.text, {axis}.type]") == ["largest |g|", "linear"]
    tab.locator("#gates-log").check()
    tab.locator("#gates-of").select_option("grad")
    tab.wait_for_function(f"{axis}.title.text === 'gradient of the gate' && {axis}.type === 'log'")
    assert trouble == []


@needs_browser
@pytest.mark.browser
def test_the_table_can_be_saved(browser: Any, run_page: Path) -> None:
    tab, _ = shown(browser, run_page)
    with tab.expect_download() as waiting:
        tab.locator("#save").click()
    lines = Path(waiting.value.path()).read_text().splitlines()
    assert waiting.value.suggested_filename == "branches.csv"
    assert lines[0].startswith("depth,branch,on at step,now,order")
    assert lines[1].startswith("0,blocks.0,")
    assert len(lines) == 1 + 12


@needs_browser
@pytest.mark.browser
def test_a_stopped_run_has_its_verdicts_first_and_no_empty_figure(browser: Any, tmp_path: Path) -> None:
    about = about_run(None) | {"start": "broken", "verdicts": {"Identity before the first step": "open"}}
    write_page(tmp_path / "run.html", History(["a", "b"]), about, "stopped by IdentityError at step 0")
    tab, trouble = shown(browser, tmp_path / "run.html")
    assert tab.locator("#verdict.bad").text_content().startswith("The network does not start as it should")
    assert tab.locator("main > section").first.get_attribute("id") == "verdicts"
    assert tab.locator(".js-plotly-plot").count() == 0
    assert tab.locator(".plot:visible").count() == 0
    assert trouble == []
