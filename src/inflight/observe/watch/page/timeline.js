// The timeline: a canvas with a lane for each server, each trainer rank and the publishes, from milliseconds to days.
"use strict";

(() => {
  const { h, byId } = Watch;
  const LABEL = 16, GAP = 8, AXIS = 24, LEFT = 4;
  const PART_NAMES = ["gather", "wire", "load", "pause", "first token"];
  const STATE_COLOURS = { healthy: "c2", joining: "c0", suspect: "c4", dead: "bad", left: "c5" };
  const LEAST_S = 0.002;

  const view = { run: 0, overview: null, from: 0, to: 1, isAll: true, data: null, boxes: [], chosen: null, inFlight: false, isWanted: false };

  const canvas = h("canvas", { tabindex: 0, role: "application", "aria-roledescription": "timeline",
    "aria-label": "Timeline of servers, trainer ranks and publishes. Left and right arrows move, plus and minus zoom, Home shows the whole run, End shows the last minute, N and P select the next and previous request, Enter opens it below." });
  const tip = h("div", { class: "tip", hidden: true });
  const status = h("p", { class: "said", "aria-live": "polite" });
  const range = h("span", { class: "soft" });
  const button = (text, label, call) => h("button", { type: "button", "aria-label": label, onclick: call }, text);
  const follow = h("button", { type: "button", "aria-pressed": "true", onclick: () => showAll() }, "Whole run");
  const legend = h("ul", { class: "legend" });
  byId("timeline-body").append(
    h("div", { class: "tools" }, button("−", "Zoom out", () => zoom(2)), button("+", "Zoom in", () => zoom(0.5)),
      button("◀", "Earlier", () => move(-0.5)), button("▶", "Later", () => move(0.5)), follow,
      button("Last minute", "Show the last minute", () => showLast(60)), h("span", { class: "gap" }), range),
    h("div", { class: "timeline" }, canvas, tip), legend, status,
    h("p", { class: "said" }, "Click the timeline, then scroll or pinch to zoom and drag to move, or use the arrow keys, + and −. Click a request to show its rollouts below."));

  // ------------------------------------------------------------------------------------------------------------ window

  const end = () => Math.max(view.overview ? view.overview.end_s : 1, 0.1);

  function show(from, to) {
    const length = Math.min(Math.max(to - from, LEAST_S), end() * 1.04);
    from = Math.max(-end() * 0.02, Math.min(from, end() * 1.02 - length));
    view.from = from;
    view.to = from + length;
    draw();
    fetchSoon();
  }

  function showAll() { view.isAll = true; show(0, end()); }
  function showLast(seconds) { view.isAll = false; show(end() - seconds, end() + seconds * 0.02); }

  function zoom(factor, around) {
    view.isAll = false;
    const at = around === undefined ? (view.from + view.to) / 2 : around;
    show(at - (at - view.from) * factor, at + (view.to - at) * factor);
  }

  function move(share) {
    view.isAll = false;
    const by = (view.to - view.from) * share;
    show(view.from + by, view.to + by);
  }

  let timer = 0;
  function fetchSoon() {
    clearTimeout(timer);
    timer = setTimeout(fetchNow, 60);
  }

  async function fetchNow() {
    if (!view.overview) return;
    if (view.inFlight) { view.isWanted = true; return; }
    view.inFlight = true;
    const { run, from, to } = view;
    try {
      const room = (to - from) * 0.25;  // preload the surroundings for small moves
      const data = await Watch.source.timeline(run, from - room, to + room, Math.min(4000, Math.max(300, canvas.clientWidth * 1.5)));
      if (run === view.run) view.data = data;
      draw();
    } catch (error) { status.textContent = error.message; }
    view.inFlight = false;
    if (view.isWanted) { view.isWanted = false; fetchSoon(); }
  }

  // ------------------------------------------------------------------------------------------------------------ drawing

  function heightOf(lane) {
    if (lane.kind === "rank") return 18;
    if (lane.kind === "publish") return 5 * 11;
    if (lane.kind === "memory") return 14;
    return Math.max(18, Math.min(lane.num_rows * 11, 176));
  }

  function draw() {
    const data = view.data;
    const width = canvas.clientWidth || 600, ratio = window.devicePixelRatio || 1;
    const lanes = data ? data.lanes : [];
    const height = AXIS + lanes.reduce((sum, lane) => sum + LABEL + heightOf(lane) + GAP, 0) + (lanes.length ? 0 : 80);
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.height = `${height}px`;
    }
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    const colours = {};
    const colour = (name) => (colours[name] = colours[name] || Watch.colour(name));
    const x = (time) => LEFT + ((time - view.from) / (view.to - view.from)) * (width - 2 * LEFT);
    view.boxes = [];
    pen.font = '11px system-ui, "DejaVu Sans", sans-serif';
    pen.textBaseline = "middle";
    drawAxis(pen, x, width, height, colour);
    if (!lanes.length) {
      pen.fillStyle = colour("soft");
      pen.textAlign = "center";
      pen.fillText(data ? "Nothing has been sampled or trained yet" : "Loading …", width / 2, height / 2);
      pen.textAlign = "left";
    }
    let top = AXIS;
    for (const lane of lanes) {
      pen.fillStyle = colour("soft");
      const name = lane.kind === "server" ? `server ${Watch.shortServer(lane.name)}` : lane.name;
      pen.fillText(name, LEFT, top + LABEL / 2);
      const body = heightOf(lane);
      pen.fillStyle = colour("back");
      pen.fillRect(0, top + LABEL, width, body);
      if (lane.forgotten_until_s > view.from) {
        pen.fillStyle = colour("grid");
        pen.fillRect(0, top + LABEL, Math.max(0, x(lane.forgotten_until_s)), body);
      }
      if (lane.bins || (lane.pieces && lane.pieces.length)) drawBins(pen, lane, data, x, top + LABEL, body, colour);
      if (lane.spans) drawSpans(pen, lane, x, top + LABEL, body, width, colour);
      if (lane.kind === "server") drawStates(pen, lane, x, top + LABEL - 3, width, colour);
      top += LABEL + body + GAP;
    }
    drawMarks(pen, data, x, height, colour);
    drawChosen(pen, colour);
    const step = view.to - view.from > 600 ? 1 : 0.1;
    range.textContent = `${Watch.clock(Math.max(0, view.from), step)} to ${Watch.clock(view.to, step)} · ${Watch.seconds(view.to - view.from)}`;
    follow.setAttribute("aria-pressed", String(view.isAll));
    drawLegend(lanes);
  }

  function drawAxis(pen, x, width, height, colour) {
    const step = Watch.niceStep(view.to - view.from, width / 100, true);
    pen.strokeStyle = colour("grid");
    pen.fillStyle = colour("soft");
    pen.textAlign = "center";
    for (let mark = Math.ceil(view.from / step) * step; mark <= view.to; mark += step) {
      const at = Math.round(x(mark)) + 0.5;
      pen.beginPath();
      pen.moveTo(at, AXIS - 6);
      pen.lineTo(at, height);
      pen.stroke();
      if (at > 18 && at < width - 18) pen.fillText(Watch.clock(Math.max(0, mark), step), at, 9);
    }
    pen.textAlign = "left";
  }

  function drawBins(pen, lane, data, x, top, body, colour) {
    const pieces = lane.pieces && lane.pieces.length ? lane.pieces : [{ from_s: data.from_s, to_s: data.to_s, bins: lane.bins }];
    const full = lane.kind === "server" ? lane.num_rows : lane.kind === "publish" ? 2 : 1;
    pen.fillStyle = colour(lane.kind === "server" ? "v0" : lane.kind === "rank" ? "v2" : "v1");
    for (const piece of pieces) {
      const width = (piece.to_s - piece.from_s) / piece.bins.length;
      piece.bins.forEach((busy, i) => {
        if (!busy) return;
        const from = x(piece.from_s + i * width), tall = Math.min(1, busy / full) * body;
        pen.fillRect(from, top + body - tall, Math.max(0.6, x(piece.from_s + (i + 1) * width) - from + 0.3), tall);
      });
    }
  }

  function drawSpans(pen, lane, x, top, body, width, colour) {
    const rows = lane.kind === "publish" ? 5 : Math.max(1, lane.kind === "memory" ? 1 : lane.num_rows);
    const tall = body / rows;
    for (const span of lane.spans) {
      const [start, until, row, facts] = span;
      const left = x(start), right = x(until);
      if (right < 0 || left > width) continue;
      const box = { left: Math.max(-4, left), right: Math.min(width + 4, Math.max(right, left + (lane.kind === "publish" ? 2 : 1))), top: top + row * tall, tall: tall > 4 ? tall - 1 : tall, lane, span };
      if (lane.kind === "server") drawRequest(pen, box, left, right, facts, colour);
      else {
        const version = lane.kind === "memory" ? 0 : facts;
        pen.fillStyle = colour(lane.kind === "publish" ? `v${row === 4 ? 5 : row}` : lane.kind === "memory" ? "v5" : `v${version % 6}`);
        pen.fillRect(box.left, box.top, box.right - box.left, box.tall);
        if (lane.kind === "rank") write(pen, box, `→ v${version}`, colour);
        if (lane.kind === "publish") write(pen, box, `${PART_NAMES[row]}${row === 0 ? ` v${version}` : ""}`, colour);
        if (lane.kind === "memory") write(pen, box, facts[0], colour);
      }
      view.boxes.push(box);
    }
  }

  // The colours of a request are the versions that sampled its longest completion, in proportion to tokens.
  function drawRequest(pen, box, left, right, [, , versions, failed, turns], colour) {
    const spans = versions.length ? versions : [[1, null]];
    let from = 0;
    for (const [until, version] of spans) {
      const a = Math.max(box.left, left + (right - left) * from), b = Math.min(box.right, left + (right - left) * until);
      from = until;
      if (b < box.left || a > box.right) continue;
      pen.fillStyle = version === null ? colour("line") : colour(`v${version % 6}`);
      pen.fillRect(a, box.top, Math.max(0.8, b - a), box.tall);
      if (version !== null) write(pen, { ...box, left: a, right: b }, `v${version}`, colour);
    }
    // The time between turns of an episode belongs to its environment: tools, rewards, waiting.
    if (turns && turns.length && right - left > 6) {
      pen.fillStyle = colour("back");
      let since = box.span[0];
      const scale = (right - left) / Math.max(1e-9, box.span[1] - box.span[0]);
      for (const [begins, ends] of [...turns, [box.span[1], box.span[1]]]) {
        if (begins > since) pen.fillRect(left + (since - box.span[0]) * scale, box.top + box.tall * 0.25, (begins - since) * scale, box.tall * 0.5);
        since = Math.max(since, ends);
      }
    }
    if (failed) {
      pen.strokeStyle = colour(failed === 1 ? "bad" : "soft");
      pen.lineWidth = 1.5;
      pen.strokeRect(box.left + 0.75, box.top + 0.75, Math.max(1, box.right - box.left - 1.5), Math.max(1, box.tall - 1.5));
      pen.beginPath();
      pen.moveTo(box.right - Math.min(8, box.right - box.left), box.top + box.tall);
      pen.lineTo(box.right, box.top);
      pen.stroke();
      pen.lineWidth = 1;
    }
  }

  function write(pen, box, text, colour) {
    if (box.tall < 9 || box.right - box.left < text.length * 6.2 + 6) return;
    pen.fillStyle = colour("on-v");
    pen.fillText(text, Math.max(box.left, 0) + 3, box.top + box.tall / 2 + 0.5);
  }

  // A line above a server's lane shows its state as seen by the run.
  function drawStates(pen, lane, x, top, width, colour) {
    const server = view.overview.servers.find((it) => it.name === lane.name);
    if (!server || !server.history.length) return;
    server.history.forEach(([time, state], i) => {
      const until = i + 1 < server.history.length ? server.history[i + 1][0] : end();
      const from = Math.max(0, x(time)), to = Math.min(width, x(until));
      if (to < 0 || from > width) return;
      pen.fillStyle = colour(STATE_COLOURS[state] || "c5");
      pen.fillRect(from, top, Math.max(1, to - from), 3);
      const text = { healthy: "", joining: "joining", suspect: "suspect", dead: "dead", left: "left" }[state];
      if (text && to - from > text.length * 6 + 4) pen.fillText(text, from + 2, top - 6);
    });
  }

  const MARKS = { saved: ["◆", "soft"], resumed: ["↻", "accent"], failure: ["✕", "bad"], scale: ["↕", "accent"], fleet: ["", "soft"] };
  function drawMarks(pen, data, x, height, colour) {
    if (!data) return;
    for (const mark of data.marks) {
      const [sign, ink] = MARKS[mark.kind] || ["·", "soft"];
      if (!sign) continue;
      const at = x(mark.time_s);
      pen.strokeStyle = pen.fillStyle = colour(ink);
      pen.setLineDash([3, 3]);
      pen.beginPath();
      pen.moveTo(at, AXIS - 4);
      pen.lineTo(at, height);
      pen.stroke();
      pen.setLineDash([]);
      pen.fillText(sign, Math.min(at - 4, canvas.clientWidth - 12), AXIS - 1);
      view.boxes.push({ left: at - 5, right: at + 5, top: 0, tall: AXIS, mark });
    }
  }

  function drawChosen(pen, colour) {
    const box = view.chosen && view.boxes.find((it) => it.span && it.lane.key === view.chosen.key && it.span[0] === view.chosen.start && it.span[2] === view.chosen.row);
    if (!box) return;
    pen.strokeStyle = colour("text");
    pen.lineWidth = 2;
    pen.strokeRect(box.left, box.top, box.right - box.left, box.tall);
    pen.lineWidth = 1;
  }

  let legendOf = "";
  function drawLegend(lanes) {
    const kinds = [...new Set(lanes.map((lane) => lane.kind))].join();
    const hasBins = lanes.some((lane) => lane.bins || (lane.pieces && lane.pieces.length));
    if (legendOf === kinds + hasBins) return;
    legendOf = kinds + hasBins;
    const swatch = (number) => h("span", { class: `swatch f${number}` });
    const entries = [];
    if (hasBins) entries.push(h("li", {}, "height: number of concurrent spans; zoom in to see them"));
    if (kinds.includes("server")) entries.push(h("li", {}, "colours of a request: weight versions ", [0, 1, 2, 3, 4, 5].map(swatch), " in turn"), h("li", {}, "border: lost (red) or cancelled"));
    if (kinds.includes("publish")) entries.push(h("li", {}, "publish: ", PART_NAMES.map((name, i) => [swatch(i === 4 ? 5 : i), `${name} `])));
    entries.push(h("li", {}, "◆ checkpoint  ↻ resumed  ↕ servers added or removed  ✕ failure"));
    legend.replaceChildren(...entries);
  }

  // ------------------------------------------------------------------------------------------------------------ hands

  function at(event) {
    const area = canvas.getBoundingClientRect();
    const px = event.clientX - area.left, py = event.clientY - area.top;
    for (let i = view.boxes.length - 1; i >= 0; i--) {
      const box = view.boxes[i];
      if (px >= box.left - 1 && px <= box.right + 1 && py >= box.top && py <= box.top + box.tall) return box;
    }
    return null;
  }

  function textOf(box) {
    if (box.mark) return `${Watch.clock(box.mark.time_s, 0.1)}: ${box.mark.what}`;
    const [start, until, row, facts] = box.span;
    const times = `${Watch.clock(start, 0.01)}, ${Watch.seconds(until - start)} long`;
    if (box.lane.kind === "rank") return `${box.lane.name}: step to version ${facts}\n${times}`;
    if (box.lane.kind === "publish") return `publish of version ${facts}: ${PART_NAMES[row]}\n${times}`;
    if (box.lane.kind === "memory") return `${facts[1]}: memory ${facts[0]}\n${times}`;
    const [item, tokens, versions, failed, turns] = facts;
    const names = versions.map(([, version]) => `v${version}`).join(", ");
    return `item ${item} at ${Watch.shortServer(box.lane.name)}\n${times}\n${Watch.count(tokens)} tokens${names ? `, longest completion by ${names}` : ""}` +
      `${turns && turns.length ? `\n${turns.length} turns` : ""}${["", "\nlost", "\ncancelled"][failed]}`;
  }

  let drag = null;
  const fingers = new Map();
  canvas.addEventListener("pointerdown", (event) => {
    fingers.set(event.pointerId, event.clientX);
    drag = { x: event.clientX, from: view.from, to: view.to, moved: false, spread: spread() };
    canvas.setPointerCapture(event.pointerId);
    canvas.focus({ preventScroll: true });
  });
  canvas.addEventListener("pointermove", (event) => {
    if (fingers.has(event.pointerId)) fingers.set(event.pointerId, event.clientX);
    if (drag && fingers.size === 2) {
      const now = spread();
      if (now && drag.spread) { zoom(drag.spread / now); drag.spread = now; drag.moved = true; }
      return;
    }
    if (drag) {
      const by = ((drag.x - event.clientX) / canvas.clientWidth) * (drag.to - drag.from);
      if (Math.abs(drag.x - event.clientX) > 3) { drag.moved = true; view.isAll = false; }
      if (drag.moved) show(drag.from + by, drag.to + by);
      return;
    }
    const box = at(event);
    tip.hidden = !box;
    if (!box) return;
    tip.textContent = textOf(box);
    const area = canvas.getBoundingClientRect();
    const px = event.clientX - area.left, py = event.clientY - area.top;
    tip.style.left = `${Math.max(0, Math.min(px + 12, area.width - tip.offsetWidth - 4))}px`;
    tip.style.top = `${py + 16}px`;
  });
  const lift = (event) => {
    fingers.delete(event.pointerId);
    if (drag && !drag.moved && event.type === "pointerup") {
      const box = at(event);
      if (box && box.span) choose(box, true);
    }
    drag = null;
  };
  canvas.addEventListener("pointerup", lift);
  canvas.addEventListener("pointercancel", lift);
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  function spread() {
    const [a, b] = [...fingers.values()];
    return b === undefined ? 0 : Math.abs(a - b);
  }

  canvas.addEventListener("wheel", (event) => {
    if (document.activeElement !== canvas && !event.ctrlKey) return;  // the page scrolls until the timeline is chosen
    event.preventDefault();
    const area = canvas.getBoundingClientRect();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) { move(event.deltaX / 800); return; }
    const time = view.from + ((event.clientX - area.left - LEFT) / (area.width - 2 * LEFT)) * (view.to - view.from);
    zoom(Math.exp(Math.max(-300, Math.min(300, event.deltaY)) * 0.0022), time);
  }, { passive: false });

  canvas.addEventListener("keydown", (event) => {
    const calls = {
      ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2), "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6),
      Home: showAll, End: () => showLast(60), n: () => next(1), p: () => next(-1),
      Enter: () => view.chosen && view.chosen.item !== undefined && Watch.rollouts.open(view.chosen.item),
    };
    if (!(event.key in calls) || event.metaKey || event.altKey) return;
    event.preventDefault();
    calls[event.key]();
  });

  function next(by) {
    const boxes = view.boxes.filter((box) => box.span).sort((a, b) => a.span[0] - b.span[0]);
    if (!boxes.length) { status.textContent = "Zoom in until individual requests are shown"; return; }
    const now = view.chosen ? boxes.findIndex((box) => box.lane.key === view.chosen.key && box.span[0] === view.chosen.start && box.span[2] === view.chosen.row) : -1;
    choose(boxes[(now + by + boxes.length) % boxes.length], false);
  }

  function choose(box, opens) {
    const isRequest = box.lane.kind === "server";
    view.chosen = { key: box.lane.key, start: box.span[0], row: box.span[2], item: isRequest ? box.span[3][0] : undefined };
    status.textContent = textOf(box).replace(/\n/g, " · ");
    draw();
    if (opens && isRequest) Watch.rollouts.open(view.chosen.item);
  }

  new ResizeObserver(() => { draw(); fetchSoon(); }).observe(canvas);

  Watch.timeline = {
    draw,
    view,
    show: (from, to) => { view.isAll = false; show(from, to); },
    update(run, overview) {
      const isOther = run !== view.run || view.overview === null || overview.number !== view.overview.number;
      const wasAtEnd = view.overview && view.to >= view.overview.end_s;
      const before = view.overview ? view.overview.end_s : 0;
      const isNew = isOther || overview.revision !== view.overview.revision;
      view.overview = overview;
      view.run = run;
      if (isOther) { view.data = null; view.chosen = null; }
      if (isOther || view.isAll) { view.isAll = true; show(0, end()); }
      else if (wasAtEnd && overview.end_s > before) show(view.from + overview.end_s - before, view.to + overview.end_s - before);
      else if (isNew) fetchSoon();
    },
  };
})();
