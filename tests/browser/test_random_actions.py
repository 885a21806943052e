"""Random actions on a live page over two models and three photos, in Chromium and Firefox.

After every twentieth action, classes and map equal those of Python's explorer, and so does the map of a second model
beside. Saved files arrive. `VITLENS_ACTIONS` sets the number of actions of all tests of this file together, and
`VITLENS_SEED` draws others.
"""

import base64
import functools
import json
import os
import random
import time

import numpy as np
import pytest
import torch

import vitlens
from browser.conftest import write_model as write_timm
from browser.fronts import MARKS
from browser.test_firefox import FIREFOX, Marionette
from browser.test_live import near
from browser.test_open_model import READY, Opened, ask_python, write_model
from browser.test_page import control, floats, plain
from vitlens.images import samples
from vitlens_explorer.explorer import Explorer
from vitlens_explorer.live import save_live_page
from vitlens_explorer.photographs import Photograph

pytestmark = [MARKS, pytest.mark.slow]
ACTIONS = int(os.environ.get("VITLENS_ACTIONS", 500))
SEED = os.environ.get("VITLENS_SEED", "")
"""Part of the seeds of all tests."""
SHARES = {"classes": 0.35, "no classes": 0.35, "firefox": 0.3}
"""Parts of the actions by test."""
BETWEEN = 20
"""Actions between two comparisons with Python."""
SIDE = 128
"""Shorter side of the photos in pixels, which no model resizes."""
PROCESSOR = {
    "image_processor_type": "BitImageProcessor",
    "size": {"shortest_edge": SIDE},
    "crop_size": {"height": 64, "width": 64},
}
"""Preprocessing of the second model."""
OWN = ("chelsea", "rocket")
"""Photos of the page. The third is uploaded."""
COMPARED = ["photograph", "whole", "view", "layer", "head", "row", "column", "query", "off", "way"]
COMPARED += ["target", "against"]
"""Controls that Python gets, in this order: a row alone makes the patch the query."""
KEYS = ["ArrowUp", "ArrowDown", "ArrowLeft", "ArrowRight", " ", "Enter", "x", "Delete", "Home"]
TEXTS = ["3", "cat", "no such class", "", "0", "9"]
LINKS = [
    "#view=attention&layer=1&patch=2,1&head=1",
    "#view=rollout&patch=3,3&off=0.1,1.2",
    "#view=relevance&target=2&against=1",
    "#view=relevance&target=length",
    "#view=zzz&layer=99&head=x&query=4&off=0.1,7.7&sample=gone",
    "#view=lens&layer=-1&patch=5",
    "#off=a.b.c&patch=,&sample=rocket",
    "#layer=1e9&head=constructor&target=map&way=zero&off=5",
    "#%&=&&view=%E0%A4%A",
    "#sample=rocket&view=norms&layer=2",
    "#",
]
DRIVE = """
window.drive = (() => {
  const root = document.querySelector(".vitlens");
  const { source } = document.querySelector("#page");
  const problems = [];
  let place = 0; // in the history of the page
  let last = 0;
  const wait = (time) => new Promise((done) => setTimeout(done, time));
  const shown = (part, which) => [...part.querySelectorAll(which)].filter((node) => node.checkVisibility());
  const choose = (list, share) => list[Math.floor(share * list.length)];
  const fire = (node, type, Kind = Event, values = {}) =>
    node.dispatchEvent(new Kind(type, { bubbles: true, cancelable: true, ...values }));
  const { pushState } = history;
  history.pushState = (...state) => {
    place += 1;
    last = place;
    pushState.apply(history, state);
  };
  addEventListener("error", ({ message }) => problems.push(message));
  addEventListener("unhandledrejection", ({ reason }) => problems.push(`${reason} ${reason?.stack}`));
  addEventListener("securitypolicyviolation", ({ blockedURI }) => problems.push(`request of ${blockedURI}`));
  for (const kind of ["error", "warn"]) console[kind] = (...words) => problems.push(words.join(" "));

  const setField = (field, share) => {
    if (field.type === "checkbox") field.click();
    else if (field.matches("select")) {
      field.selectedIndex = Math.floor(share * field.length);
      fire(field, "change");
    } else if (field.type === "range") {
      const step = Number(field.step) || 1;
      field.value = step * Math.round((share * field.max) / step);
      fire(field, "input");
    }
  };
  const acts = {
    control(which, share) {
      const node = choose(shown(root, "[data-control]"), which);
      if (!node.matches(".questions")) {
        setField(node.querySelector("select, input"), share);
        return node.dataset.control;
      }
      const view = choose([...node.querySelectorAll("[data-view]")], share);
      const menu = view.closest("select");
      if (!menu) view.click();
      else {
        view.selected = true;
        fire(menu, "change");
      }
      return view.dataset.view;
    },
    type(text) {
      const field = root.querySelector("[data-control=another] input");
      if (!field?.checkVisibility()) return "no field";
      field.value = text;
      fire(field, "change");
      return text;
    },
    press(share, excluded) {
      const scope = document.querySelector("dialog[open]") || root;
      const nodes = shown(scope, "button:not(:disabled), summary");
      const button = choose(nodes.filter((node) => !excluded.includes(node.textContent)), share);
      button?.click();
      return button?.textContent;
    },
    patch(x, y, shiftKey) {
      const node = root.querySelector("[data-panel=picture] .picture");
      const box = node.querySelector("canvas").getBoundingClientRect();
      const clientX = box.left + x * box.width;
      const clientY = box.top + y * box.height;
      const at = { clientX, clientY, shiftKey, pointerType: "mouse" };
      fire(node, "pointermove", PointerEvent, at);
      fire(node, "pointerdown", PointerEvent, { ...at, button: 0, buttons: 1 });
      fire(node, "pointerup", PointerEvent, at);
      fire(node, "pointermove", PointerEvent, at);
      if (y < 0.3) fire(root, "pointerleave", PointerEvent, { bubbles: false });
    },
    head(x, y, type) {
      const stage = root.querySelector(".stage");
      if (!stage.checkVisibility()) return "no mosaic";
      const box = stage.querySelector("canvas").getBoundingClientRect();
      fire(stage, "pointermove", PointerEvent, {
        clientX: box.left + x * box.width,
        clientY: box.top + y * box.height,
      });
      fire(stage, type, MouseEvent, { clientX: box.left + x * box.width, clientY: box.top + y * box.height });
    },
    focus(share) {
      choose(shown(document.querySelector("dialog[open]") || root, "[tabindex]"), share)?.focus();
    },
    key(share, key) {
      acts.focus(share);
      fire(document.activeElement, "keydown", KeyboardEvent, { key });
    },
    upload(name, data) {
      const files = new DataTransfer();
      files.items.add(drive.fileOf(name, data));
      const input = root.querySelector("input[type=file]");
      input.files = files.files;
      fire(input, "change");
    },
    drop(...files) {
      const dataTransfer = new DataTransfer();
      for (const [name, data] of files) dataTransfer.items.add(drive.fileOf(name, data));
      if (!files.length) dataTransfer.setData("text/plain", "x");
      fire(document, "drop", DragEvent, { dataTransfer });
    },
    cancel: () => source.send({ cancel: true }),
    link(hash) {
      if (location.hash !== hash && hash !== "#") {
        place += 1;
        last = place;
        location.hash = hash;
      }
    },
    async move(step) {
      await drive.settle();
      if (place + step < 1 || place + step > last) return "the end";
      place += step;
      const came = new Promise((done) => addEventListener("popstate", done, { once: true }));
      history.go(step);
      await Promise.race([came, wait(2000)]);
    },
    tour() {
      [...root.querySelectorAll(".tools button")].find((node) => node.textContent === "Tour").click();
    },
    close: () => document.querySelector("dialog[open]")?.close(),
    // Presses a button that asks for files, and gives it these in place of the browser's dialog.
    choose(text, ...files) {
      const button = shown(root, ".tools button").find((node) => node.textContent === text);
      if (!button) return "no button";
      const { click } = HTMLInputElement.prototype;
      HTMLInputElement.prototype.click = function take() {
        const chosen = new DataTransfer();
        for (const [name, data] of files) chosen.items.add(drive.fileOf(name, data));
        this.files = chosen.files;
        fire(this, "change");
      };
      button.click();
      HTMLInputElement.prototype.click = click;
      return text;
    },
    // Presses a button of the tools that needs no files.
    tool(text) {
      root.querySelector(".sharing").open = true;
      const button = shown(root, ".tools button").find((node) => node.textContent.startsWith(text));
      button?.click();
      return button ? button.textContent : "no button";
    },
    // Presses a button that saves, and waits for the file. Its first bytes are those of its kind.
    async save(text) {
      await drive.settle();
      const came = new Promise((done) => {
        const receive = (content, buffers) => {
          if (!content.download) return;
          source.off("msg:custom", receive);
          done([content.download[0], buffers[0]]);
        };
        source.on("msg:custom", receive);
      });
      if (acts.tool(text) === "no button") return "no button";
      const [name, file] = await Promise.race([came, wait(30000).then(() => ["nothing"])]);
      const bytes = file ? new Uint8Array(await new Blob([file]).slice(0, 15).arrayBuffer()) : [];
      const start = String.fromCharCode(...bytes);
      const [ending, expected] = text === "Save" ? [".zip", "PK\u0003\u0004"] : [".html", "<!DOCTYPE html>"];
      if (!name.endsWith(ending) || !start.startsWith(expected)) {
        problems.push(`${text} gave ${name}: ${source.get("frame").message}`);
      }
      return name;
    },
    score(share) { // or shows one of the maps that have a score
      const start = root.querySelector(".score button");
      start?.click();
      if (!start) source.send({ set: { view: choose(source.methods, share) } });
    },
    pairs() { // messages without a wait, also of values that no control takes
      source.send({ set: { layer: 1, row: 99 } });
      source.send({ press: "score" });
      source.send({ set: { photograph: "rocket" } });
      source.send({ pick: "picture", row: 1, col: 1 });
      source.send({ why: 1 });
      source.send({ ask: "look", row: 0, col: 0 });
      source.send({ ask: "tour" });
    },
  };
  return {
    acts,
    problems: () => problems,
    begin() {
      for (const node of root.querySelectorAll("details")) node.open = true;
      for (let k = 0; k < 4; k += 1) history.pushState(history.state, "", location.href);
    },
    fileOf(name, data) {
      return new File([Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0))], name);
    },
    // Waits until everything is answered and drawn.
    async settle() {
      const start = performance.now();
      const isOpen = () => source.timer || root.dataset.answers !== root.dataset.sent;
      do {
        [...root.querySelectorAll(".actions button")].find((node) => /Pause/.test(node.textContent))?.click();
        await wait(60);
        await source.turn;
        if (performance.now() - start > 30000) throw Error("The page does not answer.");
      } while (isOpen());
    },
    async frame(values) {
      await drive.settle();
      if (values) source.send({ set: values });
      await source.turn;
      const bytes = ({ buffer, byteOffset, byteLength }) => new Uint8Array(buffer, byteOffset, byteLength);
      const text = (_, value) => (ArrayBuffer.isView(value) ? btoa(String.fromCharCode(...bytes(value))) : value);
      return JSON.stringify(source.get("frame"), text);
    },
    // The model, controls and panel of the second model, or null if it has no map.
    async beside() {
      await drive.settle();
      const { beside } = source.page;
      if (!beside || beside.problem) return null;
      const controls = beside.source.controls();
      const { layer_beside: layer, head_beside: head } = source.state;
      return { model: beside.model, controls, own: { layer, head } };
    },
  };
})();
"""


def encoded(path):
    """The name of a file and its bytes in base64."""
    return [path.name, base64.b64encode(path.read_bytes()).decode()]


class Scene:
    """A live page with a model and two photos, the folders of two models, and Python's explorers of both."""

    def __init__(self, folder, title: str):
        """title: class of the second model in transformers."""
        self.first = write_timm(folder / "first", SIDE, dynamic_img_size=True)
        self.second = write_model(title, folder / "second")
        (self.second / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
        self.photos = {}
        for name in (*OWN, "coffee"):
            self.photos[name] = folder / f"{name}.png"
            samples()[name].resize((SIDE, SIDE)).save(self.photos[name])
        samples()["coffee"].resize((SIDE + 22, SIDE)).save(self.photos["coffee"])
        self.wrong = folder / "wrong.png"
        self.wrong.write_bytes(b"no image")
        self.pickle = folder / "weights.bin"
        self.pickle.write_bytes(b"PK\x03\x04")
        own = {name: self.photos[name] for name in OWN}
        self.page = save_live_page(vitlens.load_model(self.first), own, folder / "page.html")

    @functools.cached_property
    def explorers(self) -> list[Explorer]:
        """Python's explorers of the first and the second model, with all photos."""
        photographs = {name: Photograph.read(self.photos[name]) for name in OWN}
        photographs["coffee.png"] = Photograph.read(self.photos["coffee"])
        explorers = []
        for folder in (self.first, self.second):
            explorer = Explorer(vitlens.load_model(folder), self.photos[OWN[0]])
            explorer.state |= {"photographs": photographs, "photograph": OWN[0]}
            explorer.first(lambda *_: None)
            explorers.append(explorer)
        return explorers


class Chromium:
    """A page in Chromium, with real keys and drops."""

    excluded = ("Open a model", "Compare", "Reload", "Save", "Save page", "Save photo page")
    """Texts of buttons that have actions of their own, or leave the page."""

    def __init__(self, browser, scene: Scene):
        self.scene = scene
        self.opened = Opened(browser, scene.page, READY)
        self.opened.page.evaluate(DRIVE)
        self.call("begin")

    def call(self, name: str, *values):
        return self.opened.page.evaluate(
            "([name, values]) => drive[name](...values)", [name, values]
        )

    def act(self, name: str, *values):
        if name == "key":
            self.act("focus", values[0])
            self.opened.page.keyboard.press("Space" if values[1] == " " else values[1])
            return None
        return self.opened.page.evaluate(
            "([name, values]) => drive.acts[name](...values)", [name, values]
        )

    def open(self, folder) -> None:
        self.opened.drop(folder)

    def close(self) -> None:
        self.opened.close()


class Firefox:
    """A page in Firefox, driven by events."""

    excluded = (*Chromium.excluded, "Copy picture")

    def __init__(self, firefox: Marionette, scene: Scene):
        self.scene, self.firefox = scene, firefox
        firefox.send("WebDriver:SetTimeouts", script=120_000)
        firefox.send("WebDriver:Navigate", url=scene.page.as_uri())
        ready = f"return Boolean(document.querySelector('{READY}'));"
        while not self.run(ready):
            time.sleep(0.2)
        self.run(DRIVE)
        self.call("begin")

    def run(self, script: str, *values):
        command = {"script": script, "args": [*values]}
        return self.firefox.send("WebDriver:ExecuteScript", **command)["value"]

    def call(self, name: str, *values):
        return self.run("return drive[arguments[0]](...arguments[1]);", name, values)

    def act(self, name: str, *values):
        return self.run("return drive.acts[arguments[0]](...arguments[1]);", name, values)

    def open(self, folder) -> None:
        self.act("drop", *map(encoded, sorted(folder.glob("*.*"))))

    def close(self) -> None:
        """The policy of the page reports requests, which `problems` has."""


WEIGHTS = {
    "control": 24,
    "press": 16,
    "patch": 14,
    "head": 8,
    "key": 8,
    "link": 6,
    "back": 5,
    "forward": 3,
    "open": 3,
    "choose": 2,
    "compare": 4,
    "two states": 3,
    "close beside": 2,
    "save": 2,
    "save page": 1,
    "save photo page": 1,
    "upload": 4,
    "tour": 3,
    "close": 3,
    "score": 5,
    "cancel": 3,
    "type": 3,
    "own photo": 3,
    "wrong file": 1,
    "drop text": 1,
    "pairs": 2,
}
"""Actions, and how often they are drawn."""


def do(driver, kind: str, chance: random.Random) -> object:
    """Do an action of this kind. Returns what it was done to."""
    scene = driver.scene
    if kind == "control":
        return driver.act("control", chance.random(), chance.random())
    if kind == "press":
        return driver.act("press", chance.random(), driver.excluded)
    if kind == "patch":
        return driver.act("patch", chance.random(), chance.random(), chance.random() < 0.2)
    if kind == "head":
        type_ = chance.choice(["click", "contextmenu"])
        return driver.act("head", chance.random(), chance.random(), type_)
    if kind == "key":
        return driver.act("key", chance.random(), chance.choice(KEYS))
    if kind == "link":
        return driver.act("link", chance.choice(LINKS))
    if kind in ("back", "forward"):
        return driver.act("move", -1 if kind == "back" else 1)
    if kind == "open":
        return driver.open(chance.choice([scene.first, scene.second]))
    if kind in ("choose", "compare"):
        button = "Open a model" if kind == "choose" else "Compare"
        files = sorted(chance.choice([scene.first, scene.second]).glob("*.*"))
        return driver.act("choose", button, *map(encoded, files))
    if kind == "two states":
        return driver.act("tool", "Two states")
    if kind == "close beside":
        return driver.act("tool", "Close ")
    if kind.startswith("save"):
        return driver.act("save", kind.capitalize())
    if kind == "upload":
        return driver.act("upload", *encoded(scene.photos["coffee"]))
    if kind == "own photo":
        return driver.act("link", f"#sample={chance.choice(OWN)}")
    if kind == "wrong file":
        file = chance.choice([scene.wrong, scene.pickle])
        return driver.act("drop", encoded(file))
    if kind == "drop text":
        return driver.act("drop")
    if kind == "score":
        return driver.act("score", chance.random())
    if kind == "type":
        return driver.act("type", chance.choice(TEXTS))
    return driver.act(kind)


def shown_values(controls: list[dict]) -> dict:
    """Values of the controls that count for the map."""
    always = ("photograph", "view", "off", "way")
    values = {}
    for name in COMPARED:
        for each in controls:
            if each["name"] != name:
                continue
            if name in always or not (each["hidden"] or each["disabled"]):
                values[name] = each["value"]
    return values


def ask_explorer(driver, model: str, values: dict) -> dict:
    """The frame of Python's explorer of the model with this name in the page, after some values."""
    is_first = model == "first" or model.startswith("vit_tiny")
    explorer = driver.scene.explorers[0 if is_first else 1]
    if is_first:  # the second model has no such control
        values = {"whole": False} | values
    return ask_python(explorer, values)


def assert_equal_panel(got: dict, wanted: dict, values: dict) -> None:
    for name in ("selected", "rows", "cols", "unit"):
        assert got[name] == plain(wanted[name]), (name, values)
    exact = torch.from_numpy(np.frombuffer(wanted["values"], "<f4").copy())
    near(floats(got["values"]), exact, str(values))


def assert_equals_python(driver) -> str:
    """Assert that classes and maps of the page equal those of Python. Returns the view."""
    frame = json.loads(driver.call("frame"))
    if control(frame, "off")["value"] and frame["models"]:
        # The mean outputs of heads are those over the photos of the page, which Python does not have.
        frame = json.loads(driver.call("frame", {"way": "zero"}))
    values = shown_values([each for each in frame["controls"] if each["place"] != "beside"])
    expected = ask_explorer(driver, frame["model"], values)
    assert expected["message"] == "", values
    got, *others = frame["panels"]
    (wanted,) = expected["panels"]
    print(frame["model"], frame["models"], frame["beside"], values)
    assert [bar["number"] for bar in frame["bars"]] == [
        bar["number"] for bar in expected["bars"] or []
    ], values
    for bar, other in zip(frame["bars"], expected["bars"] or [], strict=True):
        assert bar["name"] == other["name"]
        assert bar["share"] == pytest.approx(other["share"], abs=1e-4), values
    assert got["title"].endswith(wanted["title"]), values
    assert others or got["title"] == wanted["title"]
    assert_equal_panel(got, wanted, values)
    assert len(others) == bool(frame["beside"])
    if others and (beside := driver.call("beside")):
        assert_beside_equals_python(driver, others[0], beside)
    return values["view"]


def assert_beside_equals_python(driver, panel: dict, beside: dict) -> None:
    """Assert that the map of the second model is that of Python, with all heads on and the layer and head that the page
    has for it."""
    values = shown_values(beside["controls"]) | {"off": []}
    for each in beside["controls"]:
        own = beside["own"].get(each["name"])
        choices = [choice for _, choice in each["options"]]
        if each["name"] in values and (own in choices or not choices and own is not None):
            values[each["name"]] = own
    expected = ask_explorer(driver, beside["model"], values)
    assert expected["message"] == "", values
    (wanted,) = expected["panels"]
    assert panel["title"].endswith(wanted["title"]), values
    assert_equal_panel(panel, wanted, values)


def drive(driver, seed: str) -> set[str]:
    """Do a part of the actions, and compare. Returns the views that were compared."""
    chance, views = random.Random(seed + SEED), set()
    for number in range(1, round(SHARES[seed] * ACTIONS) + 1):
        (kind,) = chance.choices([*WEIGHTS], [*WEIGHTS.values()])
        print(number, kind, do(driver, kind, chance))
        if chance.random() < 0.5:
            driver.call("settle")
        if number % BETWEEN == 0:
            views.add(assert_equals_python(driver))
            assert driver.call("problems") == []
    driver.call("settle")
    assert driver.call("problems") == []
    driver.close()
    return views


TITLES = {"classes": "ViTForImageClassification", "no classes": "Dinov2WithRegistersModel"}


@pytest.mark.parametrize("seed", TITLES)
def test_random_actions_in_chromium(browser, tmp_path, seed):
    views = drive(Chromium(browser, Scene(tmp_path, TITLES[seed])), seed)
    assert len(views) > 1


@pytest.mark.skipif(not FIREFOX, reason="needs firefox-esr")
def test_random_actions_in_firefox(tmp_path):
    profile = tmp_path / "profile"
    profile.mkdir()
    with Marionette(profile) as firefox:
        views = drive(Firefox(firefox, Scene(tmp_path, TITLES["classes"])), "firefox")
    assert len(views) > 1
