"""The page of a record in a real browser: what is chosen is shown, what is hostile is text, nothing is asked for."""

import csv
import html
import io
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from cumulant.observatory.report.causes import causes_part
from cumulant.observatory.report.page import render
from cumulant.observatory.report.page.render import render_page, unpack
from tests.observatory.effects import TEN, rows_of
from tests.observatory.page_data import HOSTILE, QUANTITIES, page_data


@pytest.fixture(scope="module")
def small() -> dict:
    return page_data()


@pytest.fixture
def visit(visit, tmp_path):
    """visit(data) opens the page of a record."""

    def open_page(data: dict, *size: int, **options):
        path = tmp_path / f"page{len(list(tmp_path.iterdir()))}.html"
        render_page(data, path)
        return visit(path, *size, **options)

    return open_page


def drawing(page, name: str) -> str:
    return page.inner_html(f"[data-figure='{name}'] .canvas")


def sideways(page) -> int:
    return page.evaluate("document.documentElement.scrollWidth - innerWidth")


def saved(page, selector: str) -> tuple[str, bytes]:
    with page.expect_download() as waiting:
        page.click(selector)
    return waiting.value.suggested_filename, Path(waiting.value.path()).read_bytes()


def test_first_screen_says_what_was_observed(visit, small):
    page = visit(small)
    assert page.inner_text("h1") == "all-MiniLM-L6-v2"
    opening = page.inner_text(".opening")
    assert "131\u202f072" in opening
    assert "16 November 2026" in opening
    assert page.locator("#remarkable").bounding_box()["y"] < 800
    first = page.locator(".verdict").first
    assert all(text in first.inner_text() for text in ("no", "Do hidden states become Gaussian", "0.236", "null 0.05"))


@pytest.mark.long
def test_choosing_a_quantity_or_a_null_changes_the_map(visit, small):
    page = visit(small)
    seen = [drawing(page, "heads")]
    page.select_option("#quantity", "k90")
    seen.append(drawing(page, "heads"))
    assert "k₉₀" in page.inner_text("[data-figure='heads']")
    assert "min{k" in page.inner_text("#quantity-definition")
    for view in ("std", "random", "shuffled"):
        page.click(f"#map-controls [data-value='{view}']")
        seen.append(drawing(page, "heads"))
    assert len(set(seen)) == 5
    assert page.locator("#map .cell").count() == 72


@pytest.mark.long
def test_choosing_a_head_changes_its_figures(visit, small):
    page = visit(small)
    names = ("distribution", "positions", "scatter")
    before = [drawing(page, name) for name in names]
    reading = page.inner_html("#reading .reading")
    page.click("[data-head='3.7']")
    assert page.inner_text("#chosen h3") == "Layer 3, head 7"
    assert all(drawing(page, name) != old for name, old in zip(names, before, strict=True))
    assert page.inner_html("#reading .reading") != reading
    assert f"{small['heads'][43]['values']['entropy']['p50']:.4g}" in page.inner_text("#chosen")
    page.click("[data-scatter='5.11']")
    assert page.inner_text("#chosen h3") == "Layer 5, head 11"
    page.locator("[data-sheet='all-heads'] tbody tr").nth(14).click()
    assert page.inner_text("#chosen h3") == "Layer 1, head 2"


def test_heads_are_reached_by_keyboard(visit, small):
    page = visit(small)
    page.focus("#map .cell[tabindex='0']")
    for key, name in [
        ("ArrowRight", "Layer 0, head 1"),
        ("ArrowDown", "Layer 1, head 1"),
        ("ArrowUp", "Layer 0, head 1"),
    ]:
        page.keyboard.press(key)
        assert page.inner_text("#chosen h3") == name
    page.keyboard.press("ArrowUp")
    assert page.evaluate("document.activeElement.dataset.head") == "0.1"
    assert page.is_visible("#hint")
    assert page.locator("#map .cell[aria-pressed='true']").count() == 1


@pytest.mark.long
def test_definitions_appear_where_the_pointer_rests(visit, small):
    page = visit(small)
    page.hover("[data-sheet='head'] .term >> text=Fisher trace")
    assert "tr s·Cov(k)" in page.inner_text("#hint")


def test_hostile_strings_are_shown_and_not_run(visit, small):
    bad = {"label": HOSTILE, "value": 1.0, "null": None, "unit": HOSTILE}
    verdict = {"question": HOSTILE, "answer": HOSTILE, "words": HOSTILE, "numbers": [bad]}
    layers = [{"index": i, "name": HOSTILE, "kind": HOSTILE, "heads": 12} for i in range(6)]
    quantities = [
        {"name": n, "label": HOSTILE, "equation": HOSTILE, "words": HOSTILE, "unit": HOSTILE} for n in QUANTITIES
    ]
    meta = dict.fromkeys(("model", "model_class", "text", "created", "command", "fingerprint"), HOSTILE)
    meta |= {"notes": [HOSTILE], "versions": {HOSTILE: HOSTILE}}
    page = visit(small | {"meta": meta, "verdicts": [verdict], "layers": layers, "quantities": quantities})
    assert page.inner_text("h1") == HOSTILE
    assert page.locator("#reading .reading span").first.inner_text() == HOSTILE
    page.locator("#reading .reading span").first.hover()
    assert HOSTILE in page.inner_text("#hint")
    page.click("[data-head='1.1']")
    assert HOSTILE in page.inner_text("#chosen")
    assert page.locator("img, iframe, object").count() == 0
    assert page.locator("script").count() == 2
    name, content = saved(page, "[data-figure='heads'] [data-save='svg']")
    assert re.fullmatch(r"[\w.-]+\.svg", name)
    assert b"<script" not in content


@pytest.mark.long
def test_long_names_do_not_widen_a_phone(visit, small):
    long = "x" * 300
    meta = dict.fromkeys(["model", "model_class", "text", "fingerprint", "command"], long) | {"notes": [long]}
    number = {"label": long, "value": 1.5, "null": 0.5, "unit": long}
    verdicts = [{"question": long, "answer": "yes", "words": long, "numbers": [number]}]
    quantities = [{"name": "entropy", "label": long, "equation": long, "words": long, "unit": long, "good_range": None}]
    layers = [{"index": i, "name": long, "kind": long, "heads": 12} for i in range(6)]
    text = {"name": long, "tokens": [long, long], "values": {"entropy": {"0.0": [1.0, 2.0]}}}
    parts = {"meta": meta, "verdicts": verdicts, "quantities": quantities, "layers": layers, "texts": [text]}
    page = visit(small | parts, width=390)
    assert page.inner_text("h1") == long
    assert sideways(page) <= 0


@pytest.mark.long
def test_pieces_without_spaces_are_set_apart(visit, small):
    text = {
        "name": "t",
        "tokens": ["[CLS]", "token", "##izer", "."],
        "values": {"entropy": {"0.0": [1.0, None, 3.0, 2.0]}},
    }
    page = visit(small | {"texts": [text]})
    assert page.inner_text("#reading .reading") == "[CLS] tokenizer ."
    assert saved(page, "#reading [data-save='csv']")[1].decode().splitlines()[2:4] == ["1,token,", "2,##izer,3"]


def contrast(ink: str, paper: str) -> float:
    def light(colour: str) -> float:
        parts = np.array([float(x) for x in re.findall(r"[\d.]+", colour)[:3]]) / 255
        return float(
            np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4) @ [0.2126, 0.7152, 0.0722]
        )

    a, b = sorted((light(ink), light(paper)))
    return (b + 0.05) / (a + 0.05)


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_themes_can_be_read(visit, small, scheme):
    page = visit(small, color_scheme=scheme)
    style = "(s, p) => getComputedStyle(document.querySelector(s))[p]"
    paper = page.evaluate(f"({style})('body', 'backgroundColor')")
    assert (sum(map(int, re.findall(r"\d+", paper)[:3])) > 384) == (scheme == "light")
    for selector in ("h1", ".said p", ".null", ".intro", ".numbers dt"):
        assert contrast(page.evaluate(f"({style})('{selector}', 'color')"), paper) >= 4.5, selector
    cells = "[...document.querySelectorAll('#map .cell')].map(c => [...c.children].map(e => getComputedStyle(e).fill))"
    for view in ("mean", "random"):
        page.click(f"#map-controls [data-value='{view}']")
        assert min(contrast(ink, fill) for fill, ink in page.evaluate(cells)) >= 4.5
    page.click("#theme")
    assert page.evaluate(f"({style})('body', 'backgroundColor')") != paper


@pytest.mark.parametrize(("layers", "heads"), [(6, 12), pytest.param(30, 9, marks=pytest.mark.long)])
def test_phone_does_not_scroll_sideways_and_page_is_light(visit, tmp_path, layers, heads):
    page = visit(page_data(layers, heads), width=390, height=844, has_touch=True, is_mobile=True)
    assert sideways(page) <= 0
    page.tap(f"[data-head='{layers - 1}.2']")
    assert page.inner_text("#chosen h3") == f"Layer {layers - 1}, head 2"
    assert sideways(page) <= 0
    assert (tmp_path / "page0.html").stat().st_size < 5_000_000


def test_what_happens_without_heads_is_shown_beside_them(visit, small):
    """In the list, in the card of the head and in a table that sorts; hostile words stay words."""
    causes = rows_of("induction", "loss", "removed", 1.9, 0.3, TEN)
    causes["rows"] = [{**row, "layer": 3, "type": row["type"] and HOSTILE} for row in causes["rows"]]
    words = "Without it the loss changes by +1.9 nats"
    remarkable = [{"layer": 3, "head": 1, "kind": "induction", "quantity": "entropy", "words": "x", "cause": words}]
    remarkable[0]["verdict"] = "confirmed"
    part = causes_part(causes)
    page = visit(small | {"causes": part, "remarkable": remarkable}, width=390, height=844)
    assert f"✓ {words}" in page.inner_text(".remarkable")
    assert "1 of 10 times" in page.inner_text("#causes")  # random heads, judged as the others are
    assert "loss 1.9 (1.6 to 2.2)" in page.inner_text("[data-sheet='causes']")
    assert "1 of 1 heads do what their type says" in page.inner_text("#causes")
    assert page.locator("[data-sheet='causes'] tbody tr").count() == 11
    assert HOSTILE in page.inner_text("[data-sheet='causes']")
    assert page.locator("[data-figure='causes'] svg .point").count() == 11
    assert page.locator("[data-figure='causes'] svg .limit").count() == 1  # what nine in ten random heads do not reach
    page.click("[data-sheet='causes'] thead button:has-text('Removed')")
    rows = page.locator("[data-sheet='causes'] tbody tr")
    assert rows.nth(0).inner_text().startswith("L3H1")
    rows.nth(0).click()
    assert f"✓ {words}" in page.inner_text("#chosen")
    assert sideways(page) <= 0


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({}, "No head stands out, so none was removed."),
        ({"remarkable": [{"layer": 0, "head": 0}]}, "cumulant observe --causes 1024"),
        ({"causes": {"heads": [], "reason": "causes.model: expected <b>."}}, "causes.model: expected <b>."),
    ],
)
def test_a_page_without_removed_heads_says_how_to_get_it(small, tmp_path, more, words):
    render_page(small | more, tmp_path / "page.html")
    assert html.escape(words) in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.long
def test_figures_are_saved_as_svg_and_png(visit, small):
    page = visit(small)
    for name in ("heads", "distribution", "positions", "scatter", "states-expansion", "states-sliced_w2", "spectra"):
        file, content = saved(page, f"[data-figure='{name}'] [data-save='svg']")
        assert file == f"all-MiniLM-L6-v2-{name}.svg"
        root = ElementTree.fromstring(content)
        assert root.tag.endswith("svg")
        drawn = [node for node in root.iter() if node.tag.endswith(("}rect", "}text", "}path", "}circle"))]
        assert len(drawn) > 10
        assert all(re.match(r"rgb|none|100%", node.get("fill", "")) for node in drawn)
        assert b"var(--" not in content
    file, content = saved(page, "[data-figure='heads'] [data-save='png']")
    assert file == "all-MiniLM-L6-v2-heads.png"
    assert content.startswith(b"\x89PNG")
    assert int.from_bytes(content[16:20]) == 2 * int(page.get_attribute("[data-figure='heads'] svg", "width"))


@pytest.mark.long
def test_tables_sort_and_are_saved_as_csv(visit, small):
    page = visit(small)
    file, content = saved(page, "[data-sheet='all-heads'] [data-save='csv']")
    rows = list(csv.reader(io.StringIO(content.decode())))
    assert file == "all-MiniLM-L6-v2-all-heads.csv"
    assert rows[0] == ["layer", "head", "class", *QUANTITIES]
    assert len(rows) == 73
    means = [head["values"]["k90"]["value"] for head in small["heads"]]
    assert [float(row[6]) for row in rows[1:]] == pytest.approx(means, rel=1e-4)
    page.click("[data-sheet='all-heads'] thead button >> nth=6")
    first = page.locator("[data-sheet='all-heads'] tbody tr").first.locator("td").all_inner_texts()
    best = small["heads"][int(np.argmax(means))]
    assert first[:2] == [str(best["layer"]), str(best["head"])]
    page.click("[data-sheet='all-heads'] thead button >> nth=6")
    last = page.locator("[data-sheet='all-heads'] tbody tr").last.locator("td").all_inner_texts()
    assert last == first
    page.click("#states summary")
    assert len(saved(page, "[data-sheet='states'] [data-save='csv']")[1].splitlines()) == 19


@pytest.mark.long
def test_one_figure_shows_depth_and_what_is_not_defined_says_why(visit, small):
    page = visit(small)
    figure = page.locator("[data-figure='depth']")
    assert figure.count() == 1
    panels = figure.locator("text.strong").all_text_contents()
    assert [panel.split(",")[0].split("(")[0] for panel in panels] == [
        *("Entropy of the prediction", "KL", "Added to the stream", "Effective rank")
    ]
    assert figure.locator("circle.headpoint").count() == 6 * 12 + 1  # heads, and one in the key
    assert figure.locator("circle.point").count() == 3 * 7 + 2 * 6
    figure.locator("circle.point").first.hover()
    assert "2 ± 0.1 (40 tokens)" in page.inner_text("#hint")
    assert f"Loss of the prediction: not defined here. Such as {HOSTILE}." in page.inner_text("#depth")
    assert "Attention is causal." in page.inner_text("#glossary")
    without = visit(small | {"depth": [], "undefined": []})
    assert "Nothing was recorded over depth." in without.inner_text("#depth")
    assert "Not defined here" not in without.inner_text("main")
    phone = visit(small, width=390)
    assert sideways(phone) <= 0


@pytest.mark.long
def test_depth_and_spectra(visit, small):
    page = visit(small)
    assert page.locator("#states .figure").count() == 8
    assert page.locator("[data-figure='states-sliced_w2'] .band").count() == 1
    before = drawing(page, "spectra")
    page.click("#spectra [data-value='sum']")
    after = drawing(page, "spectra")
    page.select_option("#block", "4")
    assert len({before, after, drawing(page, "spectra")}) == 3


@pytest.mark.long
@pytest.mark.parametrize(("neutral", "shift"), [("1", 0.0), ("0", -1.0)])
def test_growth_is_read_as_a_factor_or_as_its_logarithm(visit, small, neutral, shift):
    moved = {key: lambda row, k=key: None if row[k] is None else row[k] + shift for key in ("expansion", "contraction")}
    rows = [row | {key: move(row) for key, move in moved.items()} for row in small["states"]]
    page = visit(small | {"states": rows})
    card = page.locator("[data-figure='states-expansion']")
    tick = card.locator("text[text-anchor='end']").filter(has_text=re.compile(f"^{neutral}$"))
    line = float(card.locator(".reference").get_attribute("y1"))
    assert line == pytest.approx(float(tick.get_attribute("y")) - 3.5, abs=0.1)


NAN = float("nan")
BARE = {"layer": 0, "head": 0, "hopfield_class": None}
ODD = {
    "nothing": {},
    "only the model": {"meta": {"model": "m"}, "verdicts": None},
    "layers without heads": {"layers": [{"index": 0, "name": "a", "kind": "self", "heads": 2}]},
    "a head without numbers": {"heads": [BARE | {"values": {}}]},
    "a head of nulls": {
        "heads": [BARE | {"values": {"entropy": {"value": None, "std": NAN, "histogram": None, "by_position": None}}}]
    },
    "one number": {
        "heads": [BARE | {"values": {"x": {"value": 0.0, "histogram": [[0, 0, 4]], "by_position": [[0, 0.0]]}}}]
    },
    "infinite ends": {
        "heads": [
            BARE | {"values": {"x": {"value": 1.0, "p05": -1, "histogram": [[float("-inf"), 0, 4], [0, None, 2]]}}}
        ],
        "meta": {"complete": False, "tokens": NAN, "model": "\ud800"},
    },
    "layers of unlike width": {
        "heads": [
            {"layer": i, "head": j, "values": {"x": {"value": 1.0 * j}}} for i, n in enumerate([1, 3]) for j in range(n)
        ]
    },
    "depth of one": {
        "states": [{"block": 0, "stage": "in", "rms": 1.0, "expansion": NAN}],
        "spectra": [{"block": 0, "eigenvalues": [1.0]}],
    },
    "spectra of nothing": {"spectra": [{"block": 0, "eigenvalues": []}, {"block": 1, "eigenvalues": [0.0, None]}]},
    "texts of nothing": {
        "heads": [BARE | {"values": {"entropy": {"value": 1.0}}}],
        "texts": [
            {"name": None, "tokens": [], "values": {}},
            {"name": "b", "tokens": ["x"], "values": {"entropy": {"0.0": [None]}}},
        ],
    },
}


def test_a_head_is_shown_with_a_text_that_it_reads(visit):
    """Of a model that hears the encoder reads sound, the decoder a transcript."""
    heads = [BARE | {"layer": layer, "values": {"entropy": {"value": 1.0}}} for layer in (0, 1)]
    texts = [
        {"name": name, "tokens": ["a", "b"], "values": {"entropy": {key: [1.0, 2.0]}}}
        for name, key in (("words", "1.0"), ("sound", "0.0"))
    ]
    page = visit({"heads": heads, "texts": texts})
    for layer, text in ((0, "sound"), (1, "words")):
        page.click(f"[data-head='{layer}.0']")
        assert page.inner_text("[data-sheet='text'] h3").startswith(text)
        assert page.locator("#text option:checked").inner_text() == text
        assert page.locator("[data-sheet='text'] [data-at]").count() == 2
    page.select_option("#text", label="sound")  # which the other head reads
    assert "it reads another of the list" in page.inner_text("[data-sheet='text']")


@pytest.mark.long
@pytest.mark.parametrize("name", ODD)
def test_records_with_little_in_them(visit, name):
    page = visit(ODD[name], width=390)
    assert sideways(page) <= 0
    assert "NaN" not in page.inner_text("main")
    assert "undefined" not in page.inner_text("main")
    assert "NaN" not in page.inner_html("main")
    if "heads" not in ODD[name]:
        assert "No head was recorded." in page.inner_text("#heads")


@pytest.mark.long
def test_large_records_become_coarser_and_say_so(small, tmp_path, monkeypatch):
    whole = render.page(small)
    assert "To keep it below" not in whole
    data = re.search(r'id="data">([^<]*)<', whole)[1]
    monkeypatch.setattr(render, "MAX_BYTES", len(whole.encode()) - len(data) // 3)
    coarse = render.page(small)
    assert len(coarse.encode()) <= render.MAX_BYTES
    assert "To keep it below 5 MB" in coarse
    kept = unpack(re.search(r'id="data">([^<]*)<', coarse)[1])
    whole_head, head = small["heads"][5]["values"]["entropy"], kept["heads"][5]["values"]["entropy"]
    assert len(head["histogram"]) <= 32
    assert sum(row[2] for row in head["histogram"]) == whole_head["count"]
    assert head["by_position"][-1][0] == whole_head["by_position"][-1][0]
    assert head["value"] == pytest.approx(whole_head["value"], rel=1e-4)


def looking(small: dict) -> dict:
    """The record with where heads look: the previous token, in one text the first three."""
    shares = {"previous_mass": 0.75, "previous_mass_chance": 0.02, "first_mass": 0.2, "mean_distance": 2.5}
    shares |= {"distance_0": 0.05, "distance_1": 0.75, "distance_2": 0.2, "distance_3_4": 0.0}
    numbers = {name: {"value": value, "count": 1, "null_random": 0.03} for name, value in shares.items()}
    words = "looks at the previous token with 75% of its attention; entropy 0.31 nats."
    types = [{"kind": "previous-token", "words": words}]
    heads = [head | {"values": head["values"] | numbers, "types": types} for head in small["heads"]]
    text = small["texts"][0]
    rows = [[max(i - 1, 0), 60, 0, 30] if i % 7 else [0, 100] for i in range(len(text["tokens"]))]
    looks = {f"{head['layer']}.{head['head']}": rows for head in heads}
    members = [{"layer": i, "head": 1, "quantity": "previous_mass", "strength": "75%"} for i in (3, 0)]
    return small | {
        "heads": heads,
        "texts": [text | {"looks": looks}, *small["texts"][1:]],
        "types": [{"name": "previous-token", "rule": "share on the previous token ≥ 0.4", "heads": members}],
        "remarkable": [
            {"layer": 3, "head": 1, "kind": "previous-token", "quantity": "previous_mass", "words": words, "score": 0.7}
        ],
    }


def test_the_data_of_a_page_come_back(small):
    data = looking(small)
    whole = render.condensed(data, render.DETAIL_LEVELS[0])
    back = unpack(render.pack(data, render.DETAIL_LEVELS[0]))
    assert back.keys() == whole.keys()
    for key in whole.keys() - {"heads", "texts"}:
        assert back[key] == whole[key]
    for one, other in zip(back["heads"], whole["heads"], strict=True):
        assert one["types"] == other["types"]
        assert one["values"].keys() == other["values"].keys()
        for name, cell in other["values"].items():
            mine = one["values"][name]
            assert mine["value"] == pytest.approx(cell["value"], rel=1e-4)
            assert "p50" not in cell or mine["p50"] == pytest.approx(cell["p50"], rel=1e-3)
            assert mine.get("histogram", []) == cell["histogram"]
            points, drawn = cell["by_position"], mine.get("by_position", [])
            assert [p for p, _ in drawn] == [p for p, _ in points]
            room = np.ptp([v for _, v in points]) / 1900 if points else 0
            assert all(abs(a - b) <= room for (_, a), (_, b) in zip(drawn, points, strict=True))
    for one, other in zip(back["texts"], whole["texts"], strict=True):
        assert one["tokens"] == other["tokens"]
        assert one["looks"] == other["looks"]
        for name, rows in other["values"].items():
            for head, row in rows.items():
                assert np.abs(np.subtract(one["values"][name][head], row)).max() <= np.ptp(row) / 1900


def test_a_head_has_its_card_and_its_address(visit, small):
    page = visit(looking(small))
    listed = page.locator(".by-type a").all_inner_texts()
    assert listed == ["L3H1 75%", "L0H1 75%"]
    page.click(".by-type a >> nth=0")
    page.wait_for_selector("#chosen h3 >> text=Layer 3, head 1")
    assert page.input_value("#quantity") == page.get_attribute(".by-type a >> nth=0", "data-quantity")
    assert page.url.endswith("#L3H1")
    assert "looks at the previous token with 75%" in page.inner_text("#chosen")
    kinds = page.locator("[data-figure='kinds'] text").all_text_contents()
    assert {"75 %", "20 %", "0", "25", "50", "100", "% of the attention"} <= set(kinds)  # values, and an axis
    assert {"75", "1", "% of the attention"} <= set(page.locator("[data-figure='distances'] text").all_text_contents())
    assert "2.5 tokens away" in page.inner_text("[data-figure='distances']")
    tokens = len(small["texts"][0]["tokens"])
    assert page.locator("[data-figure='pattern'] .look").count() == sum(2 if i % 7 else 1 for i in range(tokens))
    assert "first token, " in page.inner_html("[data-figure='top-keys']")
    page.select_option("#quantity", "entropy")
    assert "% of tokens" in page.inner_html("[data-figure='distribution']")
    page.evaluate("location.hash = 'L5H2'")
    page.wait_for_selector("#chosen h3 >> text=Layer 5, head 2")
    page.mouse.move(2, 2)  # while the page scrolls, cells of the map come under the pointer and show their hints
    page.focus("#reading [data-at='0']")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.dataset.at") == "1"
    assert "(0) 60 %" in page.inner_text("#hint")


def test_an_address_opens_at_its_head(visit, small):
    """Figures above it are drawn later and push it down."""
    causes = causes_part(rows_of("induction", "loss", "removed", 1.9, 0.3, TEN))
    page = visit(looking(small) | {"causes": causes})
    page.evaluate("history.replaceState(null, '', '#L3H1')")
    page.reload()
    page.wait_for_selector("#chosen h3 >> text=Layer 3, head 1")
    page.wait_for_selector("[data-figure='causes'] svg")
    page.wait_for_timeout(700)  # until all is drawn
    assert abs(page.locator("#heads").bounding_box()["y"]) < 100
    assert page.input_value("#quantity") == page.get_attribute(".by-type a >> nth=0", "data-quantity")
    page.click(".by-type a >> nth=1")
    page.wait_for_selector("#chosen h3 >> text=Layer 0, head 1")
    page.go_back()
    page.wait_for_selector("#chosen h3 >> text=Layer 3, head 1")


def test_a_tap_shows_where_a_token_looks_until_the_next_tap(visit, small):
    page = visit(looking(small), width=390, height=844, has_touch=True, is_mobile=True)
    page.tap("#reading [data-at='1']")
    page.wait_for_timeout(300)
    assert "(0) 60 %" in page.inner_text("#hint")
    assert "outline" in page.get_attribute("#reading [data-at='0']", "style")
    page.tap("#texts h2")
    assert page.locator("#hint").is_hidden()


def test_sections_are_behind_a_button_on_a_phone(visit, small):
    page = visit(small, width=390, height=844, has_touch=True, is_mobile=True)
    assert page.locator("#sections a").first.is_hidden()
    page.tap("#menu")
    assert page.get_attribute("#menu", "aria-expanded") == "true"
    page.tap("#sections a[href='#texts']")
    assert page.locator("#sections a").first.is_hidden()
    assert page.url.endswith("#texts")
    page.wait_for_timeout(1500)  # it scrolls smoothly
    assert page.locator("#texts h2").bounding_box()["y"] < 844
    page.focus("#menu")
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    assert page.locator("#sections a").first.is_hidden()
    assert sideways(page) <= 0


def test_what_turns_the_direction_of_a_text_is_named(visit, small):
    turned = f"{HOSTILE}\u202e\u2066 abc"
    data = looking(small)
    data["texts"][0]["tokens"] = [turned, *data["texts"][0]["tokens"][1:]]
    page = visit(data | {"meta": small["meta"] | {"model": turned, "text": turned}})
    assert page.inner_text("h1") == f"{HOSTILE}⟨U+202E⟩⟨U+2066⟩ abc"
    assert not re.search("[\u202a-\u202e\u2066-\u2069]", page.content())
    assert "⟨U+202E⟩" in page.inner_text("#reading .reading")
    page.hover("[data-figure='top-keys'] g >> nth=0")
    assert "<img src=x onerror=alert(2)>⟨U+202E⟩" in page.inner_text("#hint")
    assert page.locator("img, iframe, object").count() == 0


def test_page_has_no_address_but_that_of_a_name(small):
    text = re.sub(r'id="data">[^<]*<', "", render.page(small))
    assert set(re.findall(r"https?://[^\s\"'<>]*", text)) == {"http://www.w3.org/2000/svg"}
    assert len(re.findall(r"<script\b", text)) == 2


def test_what_is_not_plain_data_is_refused_and_leaves_the_old_page(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    render_page({}, path)
    old = path.read_text()
    with pytest.raises(TypeError, match=r"render_page.data: expected a dictionary, got list"):
        render_page([], path)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"render_page.data\['heads'\]: expected a list, got dict"):
        render_page({"heads": {}}, path)
    with pytest.raises(TypeError, match="expected dictionaries, lists, strings and numbers, got ndarray"):
        render_page({"layers": [np.zeros(2)]}, path)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match=r"A page needs jinja2: run pip install .*\[report\]"):
        render_page({}, path)
    assert path.read_text() == old
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
