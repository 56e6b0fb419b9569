// Everything about one node, beside whatever is shown.

function drawDetail(panel) {
  const graph = current.graph, before = current.before;
  const form = graph && state.node !== null ? graph.node(state.node) || (before && before.node(state.node)) : null;
  panel.hidden = !form;
  if (!form) return clear(panel);
  const here = graph.node(form.id) ? graph : before;
  clear(panel,
    el("div", { class: "panel-head" },
      el("h2", {}, form.name),
      button("✕", () => go({ node: null }), { "aria-label": "Close the node", class: "quiet", title: "Close (Escape)" })),
    el("div", { class: "chips" },
      form.tag && chip("role", form.tag.role),
      form.tag && form.tag.bucket !== null && chip("bucket", `bucket ${form.tag.bucket}`),
      form.tag && form.tag.origin && chip("", `by ${form.tag.origin}`),
      form.mark && chip("", form.mark, "What the partitioner is told, for values that backward needs"),
      here !== graph && chip("removed", "no longer in the graph"),
      (current.changed ? graph.changes.get(form.id) || [] : []).map(([kind, detail]) => chip(kind, kind, detail))),
    el("code", { class: "code" }, form.code),
    facts(form, here),
    flightFacts(form, here),
    sourceFacts(form),
    links("reads", form.inputs, here),
    links("is read by", here.users.get(form.id) || [], here),
    el("div", { class: "actions" },
      ["diff", "memory", "timeline", "listing"].filter((tab) => tab !== state.tab).map((tab) => button(`Show in ${tab}`, () => go({ tab })))));
}

function facts(form, graph) {
  const at = graph.index.get(form.id);
  const changes = current.changed ? current.graph.changes.get(form.id) || [] : [];
  const rows = [
    ["op", form.op === "call_function" ? form.target : `${form.op} ${form.target}`],
    ["makes", form.values && `${form.values} · ${bytesText(form.nbytes)}`],
    ["parameters", someOf(form.params, 6)],
    ["alive while it runs", bytesText(graph.curves.live[at])],
    ...form.buffers.map((buffer) => [
      "allocates", `${bytesText(buffer.nbytes)} ${buffer.kind}, until ${(graph.node(buffer.last) || form).name}`]),
    ["time", form.cost ? `${timeText(form.cost)} by the model` : ""],
    ["place", `${at + 1} of ${graph.nodes.length}`],
    ...changes.map(([kind, detail]) => [kind, detail]),
  ];
  return el("dl", {}, rows.filter(([, text]) => text).map(([name, text]) => [el("dt", {}, name), el("dd", {}, text)]));
}

function flightFacts(form, graph) {
  const flight = graph.flights.find((each) => each.id === form.id);
  if (!flight) return null;
  const wait = graph.node(flight.wait);
  const rows = [
    ["collective", `${form.collective.kind} of ${plural(form.collective.ranks, "rank")}, group ${form.collective.group}`],
    ["puts in", bytesText(form.collective.nbytes)],
    ["takes", timeText(flight.time)],
    ["exposed", timeText(flight.exposed)],
    ["wait", wait ? `${wait.name}, ${plural(flight.distance, "node")} and ${timeText(flight.compute)} of compute later` : ""],
    ["route", form.collective.route],
    ["verdict", form.collective.verdict],
  ];
  return el("dl", { class: "boxed" }, rows.filter(([, text]) => text).map(([name, text]) => [el("dt", {}, name), el("dd", {}, text)]));
}

function sourceFacts(form) {
  if (!form.source) return null;
  const { file, line, module } = form.source;
  const text = current.compile.sources[file];
  const from = Math.max(1, line - 2);
  const shown = text ? text.slice(from - 1, line + 2).map((code, at) => [from + at, code]) : [[line, form.source.text]];
  return el("figure", {},
    el("figcaption", {}, `${shortPath(file)}:${line}`, module ? ` · ${module}` : ""),
    el("pre", { class: "snippet" }, shown.map(([number, code]) =>
      el("span", { class: number === line ? "here" : "" }, `${String(number).padStart(4)}  ${code}`))),
    button("Show in source", () => go({ tab: "source" })));
}

function someOf(names, most) {
  return names.length > most ? `${names.slice(0, most).join(", ")} and ${names.length - most} more` : names.join(", ");
}

function shortPath(path) {
  return path.split("/").slice(-2).join("/");
}

function links(title, ids, graph) {
  const forms = ids.map((id) => graph.node(id)).filter(Boolean);
  if (!forms.length) return null;
  const most = 24;
  return el("div", { class: "links" },
    el("h3", {}, `${title} (${forms.length})`),
    forms.slice(0, most).map((form) => button(form.name, () => go({ node: form.id }), { class: "link" })),
    forms.length > most && el("span", { class: "muted" }, ` and ${forms.length - most} more`));
}
