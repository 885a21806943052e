const SLOW = 1000; // milliseconds until a page shows progress, and dims a map that is no longer the chosen one
const forwards = (count) => `${count.toLocaleString("en")} forward${count === 1 ? "" : "s"}`;
const lasting = (seconds) =>
  seconds < 90 ? `${Math.ceil(seconds)} s` : `${Math.round(seconds / 60)} minutes`;
const megabytes = (bytes) => (bytes / 2 ** 20).toFixed(1);

function render({ model, el }) {
  const part = (kind, ...nodes) => make("div", { class: kind }, ...nodes);
  const chart = (kind, more) => make("section", { class: `dots ${kind}`, ...more });
  const alert = make("p", { class: "alert", role: "alert" });
  const close = small("Close", () => {
    [complaint, hushed] = ["", model.get("frame").answers];
    notify();
  });
  const amount = make("span", { "aria-hidden": "true" });
  const meter = make("progress", { "aria-label": "Progress" });
  const stopper = small("Cancel", () => (coming ? complain("") : send({ cancel: true })));
  const progress = part("notice progress", amount, meter, stopper);
  const warning = part("notice", alert, close);
  const heading = make(ALONE ? "h1" : "p", { class: "heading" });
  const busy = make("span", { class: "busy", role: "status" });
  const [tools, panels, top, folds] = ["tools", "panels", "top", "folds"].map((kind) => part(kind));
  const named = ALONE && "Controls"; // forms with a name are landmarks, which a page has once
  const onsubmit = (event) => event.preventDefault();
  const controls = make("form", { class: "controls", "aria-label": named, onsubmit });
  const about = make("p", { class: "note about", "aria-live": "polite" });
  const list = make("ol", { class: "bars", "aria-label": "Most likely classes" });
  const [written, said, trust] = [
    chart("parts"),
    chart("lens"),
    chart("score", { "aria-live": "polite" }),
  ];
  const mosaic = mosaicOf((content) => drag(content));
  const heads = make("section", { class: "heads" }, mosaic.node);
  const six = sixOf((content) => send(content));
  const charts = part("charts", heads, six.node, written, said, trust);
  const side = part("side", part("choices", list, controls, folds, about), charts);
  const body = part("body", panels, side);
  const root = part(
    "vitlens",
    part("header", heading, tools),
    part("notices", warning, progress),
    top,
    body,
  );
  const made = new Map(); // panels by name
  const places = new Map(); // of controls
  const uploads = new Set(); // names of the photos that were uploaded
  let sent = 0;
  let since = 0; // time of the first message without an answer
  let saving = 0;
  let turns = 0;
  let coming = null; // current upload
  let long = null; // progress of a map, score or page
  let complaint = ""; // message of this page, such as of a file that was not sent
  let hushed; // number of the answer whose message was closed
  let gone = ""; // the alert while there is no kernel
  let timer;
  const stop = watch(model, (sentence) => {
    gone = sentence;
    body.inert = Boolean(gone);
    notify();
  });
  const aim = { at: null };

  const waiting = () => sent > model.get("frame").answers;
  const send = (content, buffers = [], kept = "") => {
    if (!waiting()) since = performance.now();
    root.dataset.sent = sent = number += 1;
    complaint = kept;
    setTimeout(() => waiting() && notify(), 150);
    model.send({ ...content, number: sent }, undefined, buffers);
  };
  // While dragging over the image or along a slider, only the last message counts.
  let paced, next;
  const drag = (content) => {
    if (paced) return (next = content);
    send(content);
    paced = setTimeout(() => {
      const last = next;
      paced = next = null;
      if (last) drag(last);
    }, PACE);
  };
  // Text and share of what takes long, or undefined.
  const running = () => {
    const taken = waiting() ? performance.now() - since : 0;
    if (gone) return undefined;
    const { received, size } = coming || {};
    if (received)
      return [`Uploading: ${megabytes(received)} of ${megabytes(size)} MB`, received / size];
    if (!long) return taken < SLOW ? undefined : [`Computing: ${lasting(taken / 1000)}`];
    const { what, done, of, left } = long;
    if (!done) return [`${what} …`];
    const count = `${of ? `${done.toLocaleString("en")} of ` : ""}${forwards(of || done)}`;
    return [`${what}: ${count}${left ? `, about ${lasting(left)} left` : ""}`, of && done / of];
  };
  // Shows the alert, and what takes long.
  const notify = () => {
    const { answers, message } = model.get("frame");
    const said = gone || [complaint, answers === hushed ? "" : message].filter(Boolean).join(" ");
    if (said !== alert.textContent) alert.textContent = said;
    warning.hidden = !said;
    close.hidden = Boolean(gone);
    const [text, share] = running() || [];
    busy.textContent = !gone && (waiting() || coming || long) ? "Computing …" : "";
    progress.hidden = !text;
    root.classList.toggle("stale", waiting() && performance.now() - since >= SLOW);
    clearTimeout(timer);
    if (waiting() && !gone) timer = setTimeout(notify, SLOW);
    amount.textContent = text;
    if (share) meter.value = share;
    else meter.removeAttribute("value");
  };
  const complain = (problem) => {
    [coming, complaint] = [null, problem];
    notify();
  };
  // Sends a file, to Python in parts, each after the last was confirmed. A new file replaces it.
  const upload = async (file) => {
    const mine = (coming = { id: (number += 1), received: 0, size: file.size });
    const part = model.near ? file.size : PART;
    const most = model.get("frame").uploads;
    const limit = `is larger than ${most / 2 ** 20} MB, the upload limit. Make it smaller`;
    if (file.size > most) return complain(`${file.name} (${megabytes(file.size)} MB) ${limit}.`);
    uploads.add(file.name);
    do {
      notify();
      const at = mine.received;
      const data = await file
        .slice(at, at + part)
        .arrayBuffer()
        .catch((error) => error);
      if (coming !== mine) return;
      if (data instanceof Error)
        return complain(`${file.name} could not be read by this browser (${data.message}).`);
      const content = { upload: file.name, file: mine.id, at, of: file.size };
      const confirmed = new Promise((done) => (mine.confirm = done));
      if (at + part < file.size) model.send(content, undefined, [data]);
      else send(content, [data], complaint);
      const { received, problem } = await confirmed;
      if (coming !== mine) return;
      if (problem) {
        root.dataset.sent = sent = model.get("frame").answers; // the last message will not be answered
        return complain(problem);
      }
      mine.received = received;
    } while (mine.received < file.size);
    coming = null;
    notify();
  };
  // Photos that were dropped, pasted or chosen: the first one is uploaded.
  const take = ({ files }, missing) => {
    const [first] = files;
    complaint =
      files.length > 1
        ? `${files.length} files were given. The first one, ${first.name}, is used.`
        : "";
    if (!first) complain(missing);
    else if (ALONE && /hei[cf]$/i.test(first.type || first.name))
      complain("HEIC photos cannot be opened here. Export it as JPEG.");
    else upload(first);
  };

  const file = make("input", {
    type: "file",
    accept: "image/*",
    "aria-label": "Upload a photo",
    onchange: () => {
      take(file, "");
      file.value = "";
    },
  });
  const uploader = make(
    "label",
    { class: "button" },
    "Upload",
    make("span", {}, ", drop, or paste"),
    " a photo",
    file,
  );
  const saved = (name) => () => {
    send({ press: name });
    saving = sent;
  };
  const saver = button("Save", saved("save"), {
    title: "A zip file with the map, its numbers and the settings",
  });
  const pager = button("Save page", saved("page"), {
    title: "One file that opens in a browser, without Python",
  });
  const guided = guide({ model, root, send, waiting, panels: made });
  tools.append(uploader, saver, pager, guided.tour, busy);
  root.addEventListener("keydown", (event) => event.stopPropagation()); // avoid shortcuts of the notebook
  const place = ALONE ? document : root;
  const takes = (event) => {
    const most = model.get("frame").uploads;
    if (gone || !(ALONE || most)) return false;
    event.preventDefault(); // also where the browser would leave the page for the photo
    if (event.type !== "dragover") event.stopPropagation();
    if (!most && event.type === "drop")
      complain("A saved page takes no other photos. Use vitlens app.");
    return most > 0;
  };
  const handlers = {
    dragover(event) {
      if (takes(event))
        root.classList.toggle("dropping", event.dataTransfer.types.includes("Files"));
    },
    dragleave: ({ relatedTarget }) =>
      root.classList.toggle("dropping", relatedTarget && place.contains(relatedTarget)),
    drop(event) {
      root.classList.remove("dropping");
      if (takes(event))
        take(event.dataTransfer, "A link or a text was dropped. Drop the file of a photo.");
    },
    paste(event) {
      const typed =
        event.target.matches?.("input, select, textarea") && !event.clipboardData.files.length;
      const missing = "The clipboard has no photo. Copy one, and paste it again.";
      if (!typed && takes(event)) take(event.clipboardData, missing);
    },
  };
  for (const [event, handler] of Object.entries(handlers)) place.addEventListener(event, handler);

  // The nodes of described parts in their order, made anew where they do not stay, with the focus.
  const keep = (known, parent, described, fresh, stays) => {
    for (const each of described) {
      const old = known.get(each.name);
      if (old && stays(old.described, each)) continue;
      const next = { ...fresh(each), described: each };
      known.set(each.name, next);
      if (!old) continue;
      const held = old.node.matches(":focus-within");
      old.node.replaceWith(next.node);
      if (held) next.node.querySelector("input, select")?.focus();
    }
    const names = described.map(({ name }) => name);
    for (const name of [...known.keys()].filter((name) => !names.includes(name))) {
      known.get(name).node.remove();
      known.delete(name);
    }
    const nodes = names.map((name) => known.get(name).node);
    if (!nodes.every((node, i) => parent.children[i] === node)) parent.replaceChildren(...nodes);
  };

  const draw = async () => {
    const turn = (turns += 1);
    const [frame, pictures] = [model.get("frame"), model.get("pictures")];
    const stays = (old, next) => same({ ...old, value: null }, { ...next, value: null });
    keep(
      made,
      panels,
      frame.panels,
      ({ name }) => panelOf(name, (content) => drag(content)),
      () => true,
    );
    for (const name of new Set([...places.keys(), ...frame.controls.map((each) => each.place)])) {
      if (!places.has(name))
        places.set(name, placeOf(name, { controls, top, folds, heads, panels: made }));
      const { known, parent, show } = places.get(name);
      const here = frame.controls.filter((each) => each.place === name && each.kind !== "switches");
      keep(
        known,
        parent,
        here,
        (each) => control(each, each.kind === "range" ? drag : send),
        stays,
      );
      // While an answer is outstanding, keep the controls as the user set them.
      if (!waiting())
        for (const each of here) known.get(each.name).update(each.value, frame.message);
      show(here.some(({ hidden }) => !hidden));
    }
    body.classList.toggle("several", frame.panels.length > 1);
    if (!waiting()) aim.at = null;
    renew(list, frame.bars?.length ? frame.bars : null, (each) => bars(each, send));
    renew(written, frame.parts, (each) => contributions(each, send, aim));
    renew(said, frame.lens, (each) => classes(each, send));
    renew(trust, frame.score, (each) => {
      const [panel] = frame.panels;
      return curves(each, panel, pictures.picture, (...given) =>
        made.get(panel.name).reveal(...given),
      );
    });
    mosaic.update(frame.mosaic, waiting);
    six.update(frame.six, pictures);
    uploader.hidden = !frame.uploads;
    uploader.title = frame.uploads ? `Up to ${frame.uploads / 2 ** 20} MB, uploaded unchanged` : "";
    saver.hidden = !frame.saves;
    pager.hidden = !frame.pages;
    await Promise.all(
      frame.panels.map((each) => made.get(each.name).update(each, pictures, waiting)),
    );
    if (turn !== turns) return; // a later frame was faster
    notify();
    const names = [
      frame.controls.find(({ name }) => name === "photograph")?.value,
      frame.model,
    ].filter(Boolean);
    heading.hidden = !frame.model;
    heading.textContent = names.join(" · ");
    if (ALONE) document.title = [...names, "vitlens"].join(" · ");
    address?.drawn();
    about.textContent = frame.about || "";
    guided.drawn();
    root.dataset.answers = frame.answers;
    root.dataset.sent = sent;
  };
  const custom = (content, buffers) => {
    if (content.ask) guided.answered(content, buffers);
    else if (content.file && content.file === coming?.id) coming.confirm(content);
    else if ("progress" in content) {
      long = content.progress;
      notify();
    }
    if (content.download && content.asked === saving)
      save(content.download[0], bytesOf(buffers[0]));
  };
  model.on("change:frame", draw);
  model.on("msg:custom", custom);
  el.append(root);
  notify();
  const address = ALONE ? addressed(model, uploads, send, complain) : null;
  draw();
  return () => {
    stop();
    address?.stop();
    clearTimeout(timer);
    for (const [event, handler] of Object.entries(handlers))
      place.removeEventListener(event, handler);
    guided.stop();
    model.off("change:frame", draw);
    model.off("msg:custom", custom);
  };
}
