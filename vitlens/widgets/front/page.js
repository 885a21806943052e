function render({ model, el }) {
  const alert = make("p", { class: "alert", role: "alert" });
  const busy = make("span", { class: "busy", role: "status" });
  const tools = make("div", { class: "tools" });
  const panels = make("div", { class: "panels" });
  const controls = make("form", { class: "controls", "aria-label": "Controls", onsubmit: (event) => event.preventDefault() });
  const about = make("p", { class: "note about", "aria-live": "polite" });
  const list = make("ol", { class: "bars", "aria-label": "Most likely classes" });
  const trust = make("section", { class: "dots score", "aria-live": "polite" });
  const depth = make("section", { class: "dots" });
  const written = make("section", { class: "dots parts" });
  const said = make("section", { class: "dots lens" });
  const folds = make("div", { class: "folds" });
  const side = make("div", { class: "side" }, tools, about, controls, list, written, said, trust, depth, folds);
  const body = make("div", { class: "body" }, panels, side);
  const top = make("div", { class: "top" });
  const root = make("div", { class: "vitlens" }, alert, top, body);
  const made = { panels: new Map(), places: new Map() };
  let sent = 0;
  let saving = 0;
  let turns = 0;
  let coming = null; // current upload
  let complaint = ""; // error about a file that was not sent
  let gone = ""; // the alert while there is no kernel
  const stop = watch(model, (sentence) => {
    gone = sentence;
    alert.textContent = gone || complaint || model.get("frame").message;
    body.inert = Boolean(gone);
    if (gone) busy.textContent = "";
  });
  const aim = { at: null };

  const waiting = () => sent > model.get("frame").answers;
  const send = (content, buffers = []) => {
    root.dataset.sent = sent = number += 1;
    complaint = "";
    setTimeout(() => waiting() && status(), 150);
    model.send({ ...content, number: sent }, undefined, buffers);
  };
  // While dragging over the image or along a slider, only the last message counts.
  let paced, next;
  const drag = (content) => {
    if (paced) return (next = content);
    send(content);
    paced = setTimeout(() => {
      paced = null;
      const last = next;
      next = null;
      if (last) drag(last);
    }, PACE);
  };
  const megabytes = (bytes) => (bytes / 2 ** 20).toFixed(1);
  const status = () => {
    const progress = () => `receiving ${megabytes(coming.received)} of ${megabytes(coming.size)} MB …`;
    busy.textContent = gone ? "" : coming ? progress() : waiting() ? "working …" : "";
  };
  const complain = (problem) => {
    coming = null;
    status();
    alert.textContent = complaint = problem;
  };
  // Sends the file in parts, each after Python confirmed the last. A new file replaces it.
  const upload = async (file) => {
    if (!file) return;
    const mine = (coming = { id: (number += 1), file, received: 0, size: file.size });
    const most = model.get("frame").uploads;
    if (file.size > most) {
      const limit = `is larger than ${most / 2 ** 20} MB, the upload limit. Make it smaller`;
      return complain(`${file.name} (${megabytes(file.size)} MB) ${limit}.`);
    }
    alert.textContent = complaint = "";
    sendPart(mine);
  };
  const sendPart = async (mine) => {
    status();
    const { id, file, received, size } = mine;
    const data = await file.slice(received, received + PART).arrayBuffer().catch((error) => error);
    if (coming !== mine) return;
    if (data instanceof Error) return complain(`${file.name} could not be read by this browser (${data.message}).`);
    const part = { upload: file.name, file: id, at: received, of: size };
    if (received + PART < size) model.send(part, undefined, [data]);
    else send(part, [data]);
  };
  const confirmed = ({ file, received, problem }) => {
    if (file !== coming?.id) return;
    if (problem) {
      root.dataset.sent = sent = model.get("frame").answers; // the last message will not be answered
      return complain(problem);
    }
    coming.received = received;
    if (received < coming.size) return sendPart(coming);
    coming = null;
    status();
  };

  const file = make("input", { type: "file", accept: "image/*", "aria-label": "Upload an image", onchange: () => {
    upload(file.files[0]);
    file.value = "";
  } });
  const uploader = make("label", { class: "button" }, "Upload an image", file);
  const saver = make("button", { type: "button", class: "button", onclick: () => {
    send({ press: "save" });
    saving = sent;
  } }, "Save");
  tools.append(uploader, saver, busy);
  root.addEventListener("keydown", (event) => event.stopPropagation()); // avoid shortcuts of the notebook
  root.addEventListener("dragover", (event) => {
    if (!model.get("frame").uploads) return;
    event.preventDefault();
    root.classList.add("dropping");
  });
  root.addEventListener("dragleave", () => root.classList.remove("dropping"));
  root.addEventListener("drop", (event) => {
    root.classList.remove("dropping");
    if (!model.get("frame").uploads) return;
    event.preventDefault();
    event.stopPropagation();
    upload(event.dataTransfer.files[0]);
  });

  const keep = (known, parent, described, fresh, stays) => {
    const names = described.map((each) => each.name);
    for (const each of described)
      if (!known.has(each.name) || !stays(known.get(each.name), each)) {
        const next = fresh(each);
        if (known.has(each.name)) {
          const old = known.get(each.name).node;
          const held = old.matches(":focus-within");
          old.replaceWith(next.node);
          if (held) next.node.querySelector("input, select")?.focus();
        }
        known.set(each.name, next);
      }
    for (const name of [...known.keys()].filter((name) => !names.includes(name))) {
      known.get(name).node.remove();
      known.delete(name);
    }
    const nodes = names.map((name) => known.get(name).node);
    if (nodes.length !== parent.children.length || nodes.some((node, i) => parent.children[i] !== node))
      parent.replaceChildren(...nodes);
  };

  // Replaces a part only if it changed, so that clicks and focus are kept.
  const renew = (node, described, fresh) => {
    node.hidden = !described;
    if (same(node.told, described)) return;
    node.told = described;
    const stops = () => [...node.querySelectorAll("button, [tabindex]")];
    const held = stops().indexOf(document.activeElement);
    node.replaceChildren(...(described ? fresh(described) : []));
    stops()[held]?.focus();
  };

  const draw = async () => {
    const turn = (turns += 1);
    const frame = model.get("frame");
    const pictures = model.get("pictures");
    const fixed = (old, next) => same(old.fixed, { ...next, value: null });
    keep(made.panels, panels, frame.panels, (each) => panelOf(each.name, (content) => drag(content)), () => true);
    for (const place of new Set([...made.places.keys(), ...frame.controls.map((each) => each.place)])) {
      if (!made.places.has(place)) made.places.set(place, placeOf(place, { controls, top, folds, panels: made.panels }));
      const { known, parent, show } = made.places.get(place);
      const here = frame.controls.filter((each) => each.place === place);
      keep(known, parent, here, (each) => control(each, each.kind === "range" ? drag : send), fixed);
      // While an answer is outstanding, keep the controls as the user set them.
      if (!waiting()) for (const each of here) known.get(each.name).update(each.value, frame.message);
      show(here.some(({ hidden }) => !hidden));
    }
    body.classList.toggle("several", frame.panels.length > 1);
    if (!waiting()) aim.at = null;
    renew(list, frame.bars?.length ? frame.bars : null, (each) => bars(each, send));
    renew(written, frame.parts || null, (each) => contributions(each, send, aim));
    renew(said, frame.lens || null, (each) => classes(each, send));
    renew(trust, frame.score || null, curves);
    renew(depth, frame.dots || null, (each) => dots(each, send, aim));
    uploader.hidden = !frame.uploads;
    uploader.title = frame.uploads ? `An image of up to ${frame.uploads / 2 ** 20} MB` : "";
    saver.hidden = !frame.saves;
    await Promise.all(frame.panels.map((each) => made.panels.get(each.name).update(each, pictures, waiting)));
    if (turn !== turns) return; // a later frame was faster
    alert.textContent = gone || complaint || frame.message;
    if (!waiting()) status();
    about.textContent = frame.about || "";
    root.dataset.answers = frame.answers;
    root.dataset.sent = sent;
  };
  const custom = (content, buffers) => {
    if (content.file) confirmed(content);
    else if (content.download && content.asked === saving) save(content.download, buffers);
  };
  model.on("change:frame", draw);
  model.on("msg:custom", custom);
  el.append(root);
  draw();
  return () => {
    stop();
    model.off("change:frame", draw);
    model.off("msg:custom", custom);
  };
}
