// A table of all collectives that sorts and filters. A click on a row selects its node.

const COLUMNS = [
  {
    key: "number",
    name: "#",
    right: true,
    value: (each) => each.number,
    text: (each) => each.number + 1,
  },
  {
    key: "node",
    name: "node",
    value: (each) => each.node.name,
    text: (each) => elideMiddle(each.node.name, 19),
  },
  {
    key: "kind",
    name: "kind",
    value: (each) => each.node.collective.kind,
    text: (each) => each.node.collective.kind.replace("_into_tensor", "").replace("_tensor", ""),
  },
  {
    key: "group",
    name: "group",
    value: (each) => each.node.collective.group,
    text: (each) => `${each.node.collective.group} (${each.node.collective.ranks})`,
  },
  {
    key: "params",
    name: "parameters",
    value: (each) => each.node.params[0] || "",
    text: (each) =>
      each.node.params.length > 1
        ? `${elideMiddle(each.node.params[0], 30)} +${each.node.params.length - 1}`
        : each.node.params[0] || "",
  },
  {
    key: "bytes",
    name: "bytes",
    right: true,
    value: (each) => each.node.collective.nbytes,
    text: (each) => bytesText(each.node.collective.nbytes),
  },
  {
    key: "distance",
    name: "distance",
    right: true,
    value: (each) => each.distance,
    text: (each) => each.distance.toLocaleString("en"),
  },
  {
    key: "compute",
    name: "compute between",
    right: true,
    value: (each) => each.compute,
    text: (each) => timeText(each.compute),
  },
  {
    key: "time",
    name: "time",
    right: true,
    value: (each) => each.time,
    text: (each) => timeText(each.time),
  },
  {
    key: "exposed",
    name: "exposed",
    right: true,
    value: (each) => each.exposed,
    text: (each) => timeText(each.exposed),
  },
  {
    key: "route",
    name: "route",
    value: (each) => each.node.collective.route,
    text: (each) => each.node.collective.route,
  },
  {
    key: "decision",
    name: "decision",
    value: (each) => each.node.collective.decision,
    text: (each) => each.node.collective.decision,
  },
];
const sorting = { key: "number", down: false };
const collectiveFilter = { text: "", kind: "", exposed: false };

function drawCollectives(main) {
  const graph = current.graph;
  if (!graph) return put(main, notWritten());
  const all = graph.collectives;
  if (!isModelled(current.step)) return put(main, notModelled());
  if (!all.length)
    return put(main, el("p", { class: "muted pad" }, "This graph has no collectives."));
  const columns = COLUMNS.filter(
    (column) =>
      !["route", "decision"].includes(column.key) || all.some((each) => column.value(each)),
  );
  let shown = [];
  const list = rowList({
    label: "Collectives",
    role: "grid",
    height: 28,
    row: (at) => collectiveRow(columns, shown[at]),
    pick: (at) => go({ node: shown[at].id }),
  });
  const count = el("span", { class: "muted", role: "status" });
  const head = el("div", { class: `grid-head columns-${columns.length}`, role: "row" });
  const fill = () => {
    const words = collectiveFilter.text.toLowerCase().split(/\s+/).filter(Boolean);
    const column = columns.find((each) => each.key === sorting.key) || columns[0];
    shown = all.filter(
      (each) =>
        words.every((word) => matches(each.node, word)) &&
        (!collectiveFilter.kind || each.node.collective.kind === collectiveFilter.kind) &&
        (!collectiveFilter.exposed || each.exposed > 0),
    );
    shown.sort((a, b) => {
      const one = column.value(a),
        other = column.value(b);
      return (
        (sorting.down ? -1 : 1) *
          (typeof one === "string"
            ? one.localeCompare(other, "en", { numeric: true })
            : one - other) || a.number - b.number
      );
    });
    const sum = (pick) => shown.reduce((total, each) => total + pick(each), 0);
    clear(
      count,
      shown.length === all.length ? "" : `${shown.length} of `,
      `${plural(all.length, "collective")} · `,
      `${bytesText(sum((each) => each.node.collective.nbytes))} of input · `,
      `${timeText(sum((each) => each.time))} · `,
      el("b", { class: "exposed-text" }, `${timeText(sum((each) => each.exposed))} exposed`),
    );
    clear(
      head,
      columns.map((each) => sortButton(each, fill)),
    );
    list.fill(
      shown.length,
      shown.findIndex((each) => each.id === state.node),
    );
    // A scroll bar narrows the rows, so the header is narrowed by the same amount.
    requestAnimationFrame(() => {
      head.style.paddingRight = `${14 + list.element.offsetWidth - list.element.clientWidth}px`;
    });
  };
  const kinds = [...new Set(all.map((each) => each.node.collective.kind))];
  put(
    main,
    el(
      "div",
      { class: "bar" },
      filterField("Filter by node, op or parameter", collectiveFilter.text, (text) => {
        collectiveFilter.text = text;
        fill();
      }),
      el(
        "select",
        {
          "aria-label": "Kind of collective",
          onchange: (event) => {
            collectiveFilter.kind = event.target.value;
            fill();
          },
        },
        el("option", { value: "" }, "all kinds"),
        kinds.map((kind) =>
          el("option", { value: kind, selected: kind === collectiveFilter.kind }, kind),
        ),
      ),
      el(
        "label",
        {},
        el("input", {
          type: "checkbox",
          checked: collectiveFilter.exposed,
          onchange: (event) => {
            collectiveFilter.exposed = event.target.checked;
            fill();
          },
        }),
        " exposed only",
      ),
      count,
    ),
    el("div", { class: "grid" }, head, list.element),
  );
  fill();
}

function sortButton(column, fill) {
  const active = sorting.key === column.key;
  return el(
    "span",
    {
      role: "columnheader",
      class: `${column.right ? "right" : ""} col-${column.key}`,
      "aria-sort": active ? (sorting.down ? "descending" : "ascending") : "none",
    },
    button(`${column.name}${active ? (sorting.down ? " ↓" : " ↑") : ""}`, (event) => {
      // Numbers sort from the largest down at first.
      Object.assign(
        sorting,
        active
          ? { down: !sorting.down }
          : { key: column.key, down: Boolean(column.right) && column.key !== "number" },
      );
      fill();
      [...document.querySelectorAll(".grid-head button")][
        COLUMNS.findIndex((each) => each.key === column.key)
      ]?.focus();
    }),
  );
}

function collectiveRow(columns, each) {
  return el(
    "div",
    {
      class: `grid-row columns-${columns.length}`,
      title: [each.node.name, ...each.node.params].join("\n"),
    },
    columns.map((column) =>
      el(
        "span",
        {
          role: "gridcell",
          class: [
            column.right ? "right" : "",
            `col-${column.key}`,
            column.key === "exposed" && each.exposed ? "exposed-text" : "",
          ].join(" "),
          style:
            column.key === "exposed" && each.time
              ? { "--share": `${100 * Math.min(1, each.exposed / each.time)}%` }
              : {},
        },
        column.text(each),
      ),
    ),
  );
}
