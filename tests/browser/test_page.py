"""stage.js by itself, in a real browser, told by hand what Python would tell it."""

import base64
import io

import pytest
from PIL import Image

from browser.fronts import MARKS, PATIENCE
from vitlens.widgets.stage import HERE

pytestmark = MARKS

PYTHON = """
    window.errors = [];
    window.addEventListener("unhandledrejection", (event) => errors.push(String(event.reason)));
    window.told = [];  // what the page sends
    const view = (typed) => new DataView(typed.buffer);
    const table = new Uint8Array(1024).map((_, i) => (i % 4 === 3 ? i >> 2 : 0));  // black, from clear to opaque
    const panel = (rows, cols) => ({
        name: "picture", title: "Attention", picture: "picture", rows, cols, cell: [1 / rows, 1 / cols],
        words: `${rows} by ${cols}`, axes: ["row", "column"], selected: null, picks: "the patch",
        values: view(new Float32Array(rows * cols).map((_, i) => i)), strength: 0.5, smooth: true, lines: false,
        scale: { low: 0, high: rows * cols, colors: view(table) }, ends: ["0", "1"],
    });
    const handlers = {};
    const state = { pictures: { picture: view(Uint8Array.from(atob("PNG"), (c) => c.charCodeAt(0))) } };
    const model = {
        get: (name) => state[name], on: (name, handler) => (handlers[name] = handler), off() {},
        send: (content, _, buffers) => (content.file ? parts.push([content, buffers[0]]) : told.push(content)),
    };
    window.custom = (content) => handlers["msg:custom"](content, []);
    window.show = ({ rows = 14, cols = 14, ...frame }) => {
        state.frame = {
            panels: [panel(rows, cols)], controls: [], answers: 0, message: "", uploads: true, saves: true, bars: [],
            dots: null, score: null, ...frame,
        };
        return handlers["change:frame"]();
    };
    state.frame = { panels: [], controls: [], answers: 0, message: "" };
    render({ model, el: document.querySelector("#page") });
"""
LATER = 1e15  # an answer to whatever was asked
DOTS = {"title": "Distance", "values": [[20.0], [30.0], [40.0]], "uniform": 70.0, "layer": 2, "head": 0, "picks": True}
BARS = [{"number": number, "name": str(number), "share": 0.1, "now": False} for number in range(3)]


@pytest.fixture
def page(browser):
    page = browser.new_page(viewport={"width": 1200, "height": 1000})
    page.set_default_timeout(PATIENCE)
    page.set_content('<p id="above">A line of text above the page</p><div id="page"></div>')
    page.add_style_tag(path=HERE / "stage.css")
    Image.new("RGB", (448, 448), "gray").save(png := io.BytesIO(), "PNG")
    python = PYTHON.replace("PNG", base64.b64encode(png.getvalue()).decode())
    source = (HERE / "stage.js").read_text().replace("export default { render };", f"{{{python}}}")
    page.add_script_tag(content=source, type="module")
    page.wait_for_function("() => window.show")
    yield page
    page.close()


def show(page, **frame):
    page.evaluate("(frame) => show(frame)", frame)


def told(page) -> list:
    return [{k: v for k, v in each.items() if k != "number"} for each in page.evaluate("() => told.splice(0)")]


def at(page, row: float, column: float) -> tuple[float, float]:
    """Where on the screen a share of the picture lies."""
    box = page.locator(".picture canvas").bounding_box()
    return box["x"] + column * box["width"], box["y"] + row * box["height"]


def test_the_picture_stands_where_the_map_is_clear(page):
    show(page, rows=1, cols=2)  # values 0 and 1 of at most 2
    read = """([name, x]) => {
        const canvas = document.querySelector(`${name} canvas`);
        return [...canvas.getContext("2d").getImageData(x, 0, 1, 1).data];
    }"""
    assert page.evaluate(read, [".picture", 0]) == [128, 128, 128, 255]
    assert page.evaluate(read, [".picture", 447]) == [64, 64, 64, 255]  # half of it
    assert [page.evaluate(read, [".legend", x])[3] for x in (0, 128, 255)] == [0, 128, 255]


def test_the_grid_may_shrink_under_a_resting_pointer(page):
    show(page)
    page.mouse.move(*at(page, 0.97, 0.97))
    assert page.locator(".under").inner_text() == "row 13, column 13: 195"
    show(page, rows=3, cols=5, message="Another photograph.", answers=7)
    assert page.locator(".alert").inner_text() == "Another photograph."
    assert "row" not in page.locator(".under").inner_text()
    assert not page.evaluate("() => errors")


def test_only_a_drag_that_began_on_the_picture_moves_the_query(page):
    show(page)
    box = page.locator("#above").bounding_box()
    page.mouse.move(box["x"] + 40, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(*at(page, 0.5, 0.5), steps=5)
    assert told(page) == []
    page.mouse.up()
    page.mouse.down()
    page.mouse.move(*at(page, 0.52, 0.6))
    assert told(page) == [{"pick": "picture", "row": 7, "col": 7}, {"pick": "picture", "row": 7, "col": 8}]


def test_a_control_made_anew_keeps_the_keyboard(page):
    choice = {"name": "against", "label": "Rather than", "kind": "select", "value": 1, "high": 0, "step": 1,
              "disabled": False, "hidden": False, "hint": ""}  # fmt: skip
    show(page, controls=[choice | {"options": [["cat", 1], ["dog", 2]]}], answers=LATER)
    page.locator("select").focus()
    show(page, controls=[choice | {"options": [["dog", 2], ["cat", 1], ["owl", 3]]}], answers=LATER)
    page.keyboard.press("ArrowDown")
    assert told(page) == [{"set": {"against": 3}}]


def test_a_text_is_sent_once_it_is_typed_and_once_it_is_cleared(page):
    typed = {"name": "rather", "label": "Rather than", "kind": "text", "value": "", "options": [], "high": 0, "step": 1,
             "disabled": False, "hidden": False, "hint": "a photo of a dog"}  # fmt: skip
    show(page, controls=[typed], answers=LATER)
    page.get_by_label("Rather than").fill(" ")
    page.keyboard.press("Enter")
    assert told(page) == []
    page.get_by_label("Rather than").fill("a photo of a cat ")
    page.keyboard.press("Enter")
    assert told(page) == [{"set": {"rather": "a photo of a cat"}}]
    show(page, controls=[typed | {"value": "a photo of a cat"}], answers=LATER)
    page.get_by_label("Rather than").fill("")
    page.keyboard.press("Enter")
    assert told(page) == [{"set": {"rather": ""}}]


def test_curves_below_zero_stay_in_their_plot(page):
    values = [-0.3, 0.1, 0.04]
    lines = dict.fromkeys(("deletion", "insertion", "random deletion", "random insertion"), values)
    show(page, score={"title": "Trust", "words": "", "scale": "cosine", "shares": [0, 0.5, 1], "curves": lines})
    points = page.locator(".curve.deletion").first.get_attribute("points").split()
    heights = [float(point.split(",")[1]) for point in points]
    (zero,) = page.locator(".rule.zero").evaluate_all("lines => lines.map((line) => Number(line.getAttribute('y1')))")
    assert min(heights) >= 22 and max(heights) <= 188 - 34 and heights[0] > zero > heights[2] > heights[1]
    assert (heights[0] - zero) / (zero - heights[1]) == pytest.approx(3)


@pytest.mark.parametrize(("place", "wanted", "arrives"), [
    (".bars button >> nth=1", {"why": 1}, {"score": {"title": "How far to trust it", "words": "Soon."}}),
    (".dot >> nth=1", {"set": {"layer": 1, "head": 0}}, {}),  # what stands above it would move it away
])  # fmt: skip
def test_a_click_survives_what_arrives_between_press_and_release(page, place, wanted, arrives):
    show(page, bars=BARS, dots=DOTS, answers=LATER)
    page.locator(place).hover()
    page.mouse.down()
    show(page, bars=BARS, dots=DOTS, answers=LATER, **arrives)
    page.mouse.up()
    assert told(page) == [wanted]


def test_dots_made_anew_keep_the_keyboard(page):
    show(page, dots=DOTS, answers=LATER)
    page.locator(".plot").focus()
    page.keyboard.press("ArrowLeft")
    show(page, dots=DOTS | {"layer": 1}, answers=LATER)
    page.keyboard.press("ArrowLeft")
    assert told(page) == [{"set": {"layer": 1, "head": 0}}, {"set": {"layer": 0, "head": 0}}]


def test_bars_made_anew_keep_the_keyboard(page):
    show(page, bars=BARS, answers=LATER)
    page.locator(".bars button >> nth=1").focus()
    show(page, bars=[each | {"now": each["number"] == 1} for each in BARS], answers=LATER)
    page.keyboard.press("Enter")
    assert told(page) == [{"why": 1}]
    show(page, bars=[], answers=LATER)
    assert page.locator(".bars").is_hidden()


ANSWERS = """() => {
    window.parts = [];
    window.confirm = (count) => {  // what Python says of the next parts
        for (const [content, data] of parts.splice(0, count)) {
            come.push(data);
            const received = come.reduce((sum, each) => sum + each.byteLength, 0);
            custom({ file: content.file, received });
        }
    };
    window.come = [];
}"""


def upload(page, name, data):
    page.locator("input[type=file]").set_input_files({"name": name, "mimeType": "image/png", "buffer": data})


def until(page, condition):
    page.wait_for_function(f"() => {condition}", timeout=PATIENCE)


def test_a_file_is_sent_in_parts_of_which_four_are_under_way(page):
    show(page, uploads=64 * 2**20)
    page.evaluate(ANSWERS)
    data = bytes(range(251)) * 12_000  # 3,012,000 bytes in six parts
    upload(page, "large.png", data)
    until(page, "parts.length === 4")
    assert page.locator(".busy").inner_text() == "receiving 0.0 of 2.9 MB …"
    page.evaluate("() => confirm(2)")
    until(page, "parts.length === 4")
    assert page.locator(".busy").inner_text() == "receiving 1.0 of 2.9 MB …"
    sent = page.evaluate("() => parts.map(([content]) => content)")
    assert [each["at"] for each in sent] == [k * 2**19 for k in (2, 3, 4, 5)]
    assert {each["of"] for each in sent} == {len(data)} and ["number" in each for each in sent] == [False] * 3 + [True]
    page.evaluate("() => confirm(4)")
    whole = page.evaluate(
        """() => new Promise((done) => {
            const reader = new FileReader();
            reader.onload = () => done(reader.result.split(",")[1]);
            reader.readAsDataURL(new Blob(come));
        })"""
    )
    assert base64.b64decode(whole) == data


def test_a_new_upload_replaces_the_one_under_way(page):
    show(page, uploads=64 * 2**20)
    page.evaluate(ANSWERS)
    upload(page, "first.png", bytes(4 * 2**20))
    until(page, "parts.length === 4")
    upload(page, "second.png", b"second")
    until(page, "parts.length === 5")
    page.evaluate("() => confirm(9)")
    page.wait_for_timeout(200)
    assert page.evaluate("() => parts.length") == 0, "nothing more of the first"


def test_what_becomes_of_an_upload_is_said(page):
    show(page, uploads=2**20)
    assert page.locator("label.button").get_attribute("title") == "A picture of up to 1 MB, sent as it is"
    page.evaluate(ANSWERS)
    upload(page, "huge.png", bytes(2**20 + 1))
    words = "huge.png (1.0 MB) is larger than the 1 MB that can be uploaded. Make it smaller."
    assert page.locator(".alert").inner_text() == words and not page.evaluate("() => parts.length")
    upload(page, "small.png", b"small")
    until(page, "parts.length === 1")
    assert page.locator(".alert").inner_text() == ""
    page.evaluate("() => custom({ file: parts[0][0].file, problem: 'It was replaced.' })")
    assert page.locator(".alert").inner_text() == "It was replaced." and page.locator(".busy").inner_text() == ""
    upload(page, "late.png", b"late")
    until(page, "document.querySelector('.busy').textContent.includes('Python is busy, or gone.')")
    show(page, uploads=2**20, about="late.png was turned upright.", answers=LATER)
    assert page.locator(".about").inner_text() == "late.png was turned upright."
