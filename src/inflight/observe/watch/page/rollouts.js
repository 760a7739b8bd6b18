// The list of groups, and the details of one: completions by version, requests, and recorded tokens.
"use strict";

(() => {
  const { h, byId, isNumber } = Watch;
  const PAGE = 50, MOST_TOKENS = 5000;
  const view = { run: 0, number: 0, revision: -1, state: "", order: "newest", offset: 0, item: null, colouring: "version", detail: null };

  const STATES = [["", "all"], ["trained", "trained"], ["waiting", "waiting for a step"], ["dropped", "dropped"], ["unfinished", "not finished"]];
  const ORDERS = [["newest", "newest first"], ["reward", "highest reward first"], ["length", "longest first"], ["age", "oldest versions first"]];
  const select = (label, options, key) => h("label", {}, `${label} `, h("select", { onchange: (event) => { view[key] = event.target.value; view.offset = 0; fetchList(); } },
    options.map(([value, text]) => h("option", { value }, text))));
  const list = h("ol", { class: "items", "aria-label": "Groups" });
  const summary = h("span", { class: "soft" });
  const earlier = h("button", { type: "button", onclick: () => { view.offset += PAGE; fetchList(); } }, "Next");
  const later = h("button", { type: "button", onclick: () => { view.offset = Math.max(0, view.offset - PAGE); fetchList(); } }, "Back");
  const detail = h("div", { class: "detail", tabindex: -1, "aria-live": "polite" }, h("p", { class: "soft" }, "Choose a group to see its completions."));
  byId("rollouts-body").append(
    h("div", { class: "tools" }, select("Show", STATES, "state"), select("Order", ORDERS, "order"), h("span", { class: "gap" }), summary, later, earlier),
    h("div", { class: "split" }, list, detail));

  async function fetchList() {
    try {
      const found = await Watch.source.rollouts(view.run, { state: view.state, order: view.order, offset: view.offset, limit: PAGE });
      const last = Math.min(found.total, found.offset + found.items.length);
      summary.textContent = found.total ? `${found.offset + 1} to ${last} of ${Watch.count(found.total)}` : "";
      later.disabled = found.offset === 0;
      earlier.disabled = last >= found.total;
      const focused = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.item : null;
      list.replaceChildren(...found.items.map(entry));
      if (!found.items.length) list.replaceChildren(h("li", { class: "soft" }, "No groups"));
      if (focused) { const again = list.querySelector(`[data-item="${CSS.escape(focused)}"]`); if (again) again.focus(); }
    } catch (error) { summary.textContent = error.message; }
  }

  const mean = (values) => (values.length ? values.reduce((sum, it) => sum + it, 0) / values.length : null);

  function stateOf(item) {
    if (item.state === "trained") return `trained in v${item.version}`;
    if (item.state === "dropped") return `dropped: ${item.reason}`;
    return { unfinished: "not finished", waiting: "waiting for a step" }[item.state] || item.state;
  }

  const versionsOf = (item) => (item.oldest === null ? "" : item.oldest === item.newest ? `v${item.oldest}` : `v${item.oldest} to v${item.newest}`);

  function entry(item) {
    const highest = Math.max(1e-9, ...item.rewards.map(Math.abs));
    const bars = h("span", { class: "rewards", "aria-hidden": "true" }, item.rewards.slice(0, 32).map((reward) => {
      const bar = h("i", {});
      bar.style.height = `${Math.max(1, (Math.abs(reward) / highest) * 16)}px`;
      if (reward < 0) bar.style.background = "var(--c1)";
      return bar;
    }));
    const tokens = item.lengths.reduce((sum, it) => sum + it, 0);
    return h("li", {}, h("button", { type: "button", "data-item": item.item, "aria-current": item.item === view.item ? "true" : null, onclick: () => open(item.item, false) },
      h("b", {}, `#${item.item}`),
      h("span", {}, `reward ${Watch.number(mean(item.rewards))} · ${Watch.count(tokens)} tokens · ${versionsOf(item) || "no version"}`),
      bars,
      h("span", { class: "soft" }, Watch.clock(item.end_s, 1)),
      h("span", { class: item.state === "dropped" ? "warn" : "soft" }, stateOf(item)),
      h("span", { class: "bad" }, item.num_failures ? `${item.num_failures} failed` : "")));
  }

  async function open(item, scrolls) {
    view.item = item;
    for (const button of list.querySelectorAll("button")) {
      if (button.dataset.item === String(item)) button.setAttribute("aria-current", "true");
      else button.removeAttribute("aria-current");
    }
    try {
      view.detail = await Watch.source.rollout(view.run, item);
      showDetail();
      if (scrolls) detail.scrollIntoView({ block: "nearest" });
    } catch (error) { detail.replaceChildren(h("p", { class: "soft" }, error.message)); }
  }

  function showDetail() {
    const it = view.detail;
    const records = it.tokens;
    const longest = Math.max(1, ...it.parts.map((part) => part.num_tokens));
    const average = mean(it.rewards);
    const spread = Math.sqrt(mean(it.rewards.map((reward) => (reward - average) ** 2)) || 0);
    const completions = it.parts.map((part, i) => completion(part, it.rewards.length === it.parts.length ? it.rewards[i] : null, average, spread, longest,
      records ? records.filter((_, number) => numberOf(records, number) === part.number) : []));
    const loose = records ? records.filter((_, number) => !it.parts.some((part) => part.number === numberOf(records, number))) : [];
    detail.replaceChildren(h("div", {},
      h("div", { class: "tools" }, h("h3", {}, `Group ${it.item}`), h("span", { class: "soft" }, stateOf(it)), h("span", { class: "gap" }),
        records ? colourings() : h("span", { class: "soft" }, "coloured by version")),
      h("p", { class: "soft" }, `${Watch.clock(it.start_s, 0.1)} to ${Watch.clock(it.end_s, 0.1)} at ${it.endpoints.map(Watch.shortServer).join(", ") || "no server"}`,
        it.rewards.length ? ` · mean reward ${Watch.number(average)}, deviation ${Watch.number(spread)}` : ""),
      it.what.map((what) => h("p", { class: "bad" }, what)),
      records && records.length ? promptOf(records[0]) : h("p", { class: "soft" }, it.state === "trained" ? "No tokens of this group were recorded: run with [run] record = true to see texts." : "Texts are recorded of groups that were trained on, with [run] record = true."),
      completions.length ? completions : h("p", { class: "soft" }, "Nothing was sampled."),
      loose.map((record) => recordText(record)),
      requests(it)));
  }

  // Without episodes, each completion is one rollout; an episode may have several rollouts.
  const numberOf = (records, number) => (records.every((record) => record.episode === records[0].episode) ? number : records[number].episode);

  function colourings() {
    const options = [["version", "version"], ["advantage", "advantage"], ["difference", "logprob difference"]];
    return h("label", {}, "Colour by ", h("select", { onchange: (event) => { view.colouring = event.target.value; showDetail(); } },
      options.map(([value, text]) => h("option", { value, selected: value === view.colouring }, text))));
  }

  function completion(part, reward, average, spread, longest, records) {
    const strip = h("div", { class: "strip", role: "img", "aria-label": part.spans.map(([start, end, version]) => `tokens ${start} to ${end} by version ${version}`).join("; ") },
      part.spans.map(([start, end, version]) => {
        const piece = h("span", { class: Watch.versionClass(version), title: `tokens ${start} to ${end}: version ${version}` }, (end - start) / longest > 0.05 ? `v${version}` : "");
        piece.style.width = `${((end - start) / longest) * 100}%`;
        return piece;
      }));
    const advantage = isNumber(reward) && spread > 0 ? (reward - average) / spread : null;
    return h("div", { class: "completion" },
      h("h4", {}, `Completion ${part.number}`, h("span", {}, `${Watch.count(part.num_tokens)} tokens`), isNumber(reward) ? h("span", {}, `reward ${Watch.number(reward)}`) : "",
        advantage === null ? "" : h("span", {}, `${Watch.number(advantage)} deviations from the mean`), h("span", {}, part.finish_reason)),
      strip,
      part.turns.length ? turns(part.turns) : "",
      records.map((record) => recordText(record)));
  }

  function turns(values) {
    return h("details", {}, h("summary", {}, `${values.length} turns`),
      h("table", {}, h("thead", {}, h("tr", {}, ["turn", "began", "sampling", "tokens", "environment before"].map((name) => h("th", { class: "number" }, name)))),
        h("tbody", {}, values.map(([start, end, tokens], i) => h("tr", {}, [String(i + 1), Watch.clock(start, 0.01), Watch.seconds(end - start), Watch.count(tokens),
          i ? Watch.seconds(start - values[i - 1][1]) : "–"].map((text) => h("td", { class: "number" }, text)))))));
  }

  function promptOf(record) {
    const text = textOf(record.prompt);
    return h("details", { open: text.length < 1500 }, h("summary", {}, `Prompt, ${Watch.count(record.prompt.token_ids.length)} tokens`),
      h("div", { class: "text", tabindex: 0 }, text));
  }

  const textOf = (part) => (part.pieces ? part.pieces.join("") : part.token_ids.join(" "));

  // The tokens of a recorded rollout, with the output of its environment and tools in between.
  function recordText(record) {
    const { token_ids: ids, pieces, versions, behaviour_logprobs: behaviour, trainer_logprobs: trainer, advantages } = record.completion;
    const at = (values, i) => (values ? values[i] : null);
    const runs = [];
    for (let i = 0; i < Math.min(ids.length, MOST_TOKENS); i++) {
      const token = { text: pieces ? pieces[i] : `${ids[i]} `, version: versions[i], logprob: at(behaviour, i), advantage: at(advantages, i), difference: null };
      if (isNumber(at(trainer, i)) && isNumber(token.logprob)) token.difference = trainer[i] - token.logprob;
      const last = runs[runs.length - 1];
      const isSame = last && last.version === token.version && (view.colouring === "version" || (view.colouring === "advantage" && last.advantage === token.advantage));
      if (isSame) { last.text += token.text; last.logprob = last.difference = null; if (last.advantage !== token.advantage) last.advantage = null; } else runs.push(token);
    }
    return h("div", { class: "text", tabindex: 0 }, runs.map((run) => {
      if (run.version === null) return h("span", { class: "observed", title: "not sampled: from the environment or a tool" }, run.text);
      const element = h("span", { class: "t", title: titleOf(run) }, run.text);
      paint(element, run);
      return element;
    }), ids.length > MOST_TOKENS ? h("span", { class: "soft" }, ` … and ${Watch.count(ids.length - MOST_TOKENS)} more tokens`) : "");
  }

  const titleOf = (piece) => [`version ${piece.version}`, isNumber(piece.logprob) ? `logprob ${piece.logprob.toFixed(3)}` : "", isNumber(piece.difference) ? `trainer minus behaviour ${piece.difference.toFixed(4)}` : "",
    isNumber(piece.advantage) ? `advantage ${piece.advantage.toFixed(3)}` : ""].filter(Boolean).join(", ");

  function paint(element, piece) {
    if (view.colouring === "version") { if (piece.version !== null) element.classList.add(Watch.versionClass(piece.version)); return; }
    const value = piece[view.colouring];
    if (!isNumber(value)) return;
    const strength = Math.min(1, Math.abs(value) / (view.colouring === "difference" ? 0.5 : 2));
    element.style.background = `color-mix(in srgb, var(${value < 0 ? "--v1" : "--v0"}) ${Math.round(strength * 80)}%, transparent)`;
    if (strength > 0.02) element.style.textDecoration = value < 0 ? "underline dotted" : "underline";
  }

  function requests(it) {
    return h("details", {}, h("summary", {}, `${it.requests.length} request${it.requests.length === 1 ? "" : "s"}`), h("div", { class: "scroll" },
      h("table", {}, h("thead", {}, h("tr", {}, ["began", "length", "server", "completions", "tokens", "error"].map((name) => h("th", {}, name)))),
        h("tbody", {}, it.requests.map((request) => h("tr", {}, [Watch.clock(request.start_s, 0.01), Watch.seconds(request.end_s - request.start_s), Watch.shortServer(request.endpoint),
          request.numbers.join(", "), Watch.count(request.num_tokens)].map((text) => h("td", {}, text)), h("td", { class: "bad" }, request.error || "")))))));
  }

  Watch.rollouts = {
    open: (item) => open(item, true),
    update(run, overview) {
      const isOther = run !== view.run || overview.number !== view.number;
      if (isOther) {
        view.run = run;
        view.number = overview.number;
        view.offset = 0;
        view.item = null;
        detail.replaceChildren(h("p", { class: "soft" }, "Choose a group to see its completions."));
      }
      if (isOther || overview.revision !== view.revision) { view.revision = overview.revision; fetchList(); }
    },
  };
})();
