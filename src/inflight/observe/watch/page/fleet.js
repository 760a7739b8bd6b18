// Servers, failures and the ledger of items.
"use strict";

(() => {
  const { h, byId } = Watch;
  const SIGNS = { healthy: ["●", "good"], joining: ["◐", "accent"], suspect: ["▲", "warn"], dead: ["✕", "bad"], left: ["○", "soft"] };

  const servers = h("div", { class: "scroll servers", tabindex: 0, role: "region", "aria-label": "Servers" });
  const failures = h("div", { class: "scroll" });
  const config = h("details", {}, h("summary", {}, "Configuration of the run"), h("pre", {}));
  byId("fleet-body").append(h("div", { class: "card" }, h("h3", {}, "Servers"), servers), h("div", { class: "card" }, h("h3", {}, "Failures"), failures));
  byId("ledger").append(h("div", { class: "card" }, config));
  byId("ledger").lastChild.style.marginTop = "12px";

  function showServers(overview) {
    if (!overview.servers.length) { servers.replaceChildren(h("p", { class: "soft" }, "No server has joined yet")); return; }
    const rows = overview.servers.map((server) => {
      const [sign, ink] = SIGNS[server.state] || ["·", "soft"];
      const changes = Math.max(0, server.history.length - 1);
      const since = changes ? `since ${Watch.clock(server.history[server.history.length - 1][0], 1)}` : "";
      return h("tr", {},
        h("td", {}, Watch.shortServer(server.name)),
        h("td", {}, h("span", { class: ink }, `${sign} ${server.state}`), " ", h("span", { class: "soft" }, since)),
        h("td", { class: "number" }, server.version === null ? "–" : `v${server.version}`),
        h("td", { class: "number" }, Watch.count(server.num_requests)),
        h("td", { class: `number ${server.num_errors ? "bad" : ""}` }, Watch.count(server.num_errors)),
        h("td", { class: "number" }, Watch.number(server.num_tokens)),
        h("td", { class: "number" }, Watch.seconds(server.paused_s)));
    });
    servers.replaceChildren(h("table", {},
      h("thead", {}, h("tr", {}, h("th", {}, "server"), h("th", {}, "state"), ...["serves", "requests", "lost", "tokens", "paused"].map((name) => h("th", { class: "number" }, name)))),
      h("tbody", {}, rows)));
  }

  function showFailures(overview) {
    const counts = Object.entries(overview.num_failures);
    if (!counts.length) { failures.replaceChildren(h("p", { class: "soft" }, "None so far")); return; }
    const newest = [];
    for (const failure of [...overview.failures].reverse()) {
      const same = newest.find((it) => it.kind === failure.kind && it.what === failure.what && it.where === failure.where);
      if (same) same.times += 1;
      else if (newest.length < 40) newest.push({ ...failure, times: 1 });
    }
    failures.replaceChildren(
      h("p", {}, counts.map(([kind, count], i) => [i ? " · " : "", `${kind}: `, h("b", {}, Watch.count(count))])),
      h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "time"), h("th", {}, "what"), h("th", {}, "where"))),
        h("tbody", {}, newest.map((failure) => h("tr", {},
          h("td", { class: "number" }, Watch.clock(failure.time_s, 0.1)),
          h("td", {}, h("span", { class: "bad" }, failure.kind), failure.times > 1 ? h("b", {}, ` ${failure.times} times`) : "", failure.what ? ` ${failure.what.length > 240 ? `${failure.what.slice(0, 240)} …` : failure.what}` : ""),
          h("td", { class: "soft where" }, Watch.shortServer(failure.where)))))));
  }

  function showLedger(overview) {
    const body = byId("ledger-body");
    const ledger = overview.ledger;
    if (!ledger || ledger.trained === undefined) { body.replaceChildren(h("p", { class: "soft" }, "No group has been trained on or dropped yet")); return; }
    const parts = [["trained", ledger.trained, "f2"], ...Object.entries(ledger.dropped || {}).map(([reason, count], i) => [`dropped: ${reason}`, count, ["f1", "f3", "f4"][i % 3]]), [overview.status === "running" ? "in flight" : "left over", ledger.outstanding, "f0"]];
    const issued = parts.reduce((sum, [, count]) => sum + count, 0);
    const share = (count) => (issued ? count / issued : 0);
    const bar = h("div", { class: "bar", role: "img", "aria-label": parts.map(([name, count]) => `${name}: ${count}`).join(", ") },
      parts.filter(([, count]) => count).map(([name, count, fill]) => {
        const piece = h("span", { class: fill, title: `${name}: ${Watch.count(count)}` }, share(count) * body.clientWidth > 6.6 * (name.length + 8) ? `${name} ${Watch.percent(share(count))}` : "");
        piece.style.flexGrow = count;
        piece.style.flexBasis = "0";
        return piece;
      }));
    body.replaceChildren(
      h("p", {}, h("b", {}, Watch.count(issued)), " groups issued = ", parts.map(([name, count], i) => [i ? " + " : "", h("b", {}, Watch.count(count)), ` ${name}`]),
        ledger.requeued ? h("span", { class: "soft" }, ` · put back and issued again: ${Watch.count(ledger.requeued)}`) : ""),
      bar,
      h("ul", { class: "legend" }, parts.map(([name, count, fill]) => h("li", {}, h("span", { class: `swatch ${fill}` }), `${name} `, h("b", {}, Watch.percent(share(count)))))));
  }

  Watch.fleet = {
    update(overview) {
      showServers(overview);
      showFailures(overview);
      showLedger(overview);
      config.lastChild.textContent = JSON.stringify(overview.config, null, 2);
    },
  };
})();
