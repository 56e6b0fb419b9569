// A virtual list: only visible rows exist as elements. Arrow, page, Home and End keys move the
// active row, Enter selects it.

let listCount = 0;

function rowList({ label, height = 22, row, pick, role = "listbox" }) {
  const key = `list${listCount++}`;
  const space = el("div", { class: "rows-space", role: "presentation" });
  const element = el("div", { class: "rows", tabindex: 0, role, "aria-label": label }, space);
  let count = 0,
    active = -1,
    frame = 0,
    drawn = new Map();

  function draw() {
    frame = 0;
    const from = Math.max(0, Math.floor(element.scrollTop / height) - 8);
    const to = Math.min(count, Math.ceil((element.scrollTop + element.clientHeight) / height) + 8);
    const next = new Map();
    for (let at = from; at < to; at++) {
      let item = drawn.get(at);
      if (!item) {
        item = row(at);
        item.classList.add("row");
        item.id = `${key}-${at}`;
        item.setAttribute("role", role === "listbox" ? "option" : "row");
        item.setAttribute("aria-posinset", at + 1);
        item.setAttribute("aria-setsize", count);
        item.style.top = `${at * height}px`;
        item.style.height = `${height}px`;
        item.addEventListener("click", () => {
          active = at;
          pick(at);
          mark();
        });
        space.append(item);
      }
      next.set(at, item);
    }
    for (const [at, item] of drawn) if (!next.has(at)) item.remove();
    drawn = next;
    mark();
  }

  function mark() {
    for (const [at, item] of drawn) {
      item.classList.toggle("active", at === active);
      item.setAttribute("aria-selected", at === active);
    }
    if (drawn.has(active)) element.setAttribute("aria-activedescendant", `${key}-${active}`);
    else element.removeAttribute("aria-activedescendant");
  }

  function later() {
    if (!frame) frame = requestAnimationFrame(draw);
  }

  function reveal(at, middle) {
    const top = at * height;
    if (
      middle ||
      top < element.scrollTop ||
      top + height > element.scrollTop + element.clientHeight
    ) {
      element.scrollTop = middle
        ? top - element.clientHeight / 2
        : top < element.scrollTop
          ? top
          : top + height - element.clientHeight;
    }
    later();
  }

  element.addEventListener("scroll", later);
  element.addEventListener("keydown", (event) => {
    const page = Math.max(1, Math.floor(element.clientHeight / height) - 1);
    const steps = {
      ArrowDown: 1,
      ArrowUp: -1,
      PageDown: page,
      PageUp: -page,
      Home: -count,
      End: count,
    };
    if (event.key in steps && !event.altKey && !event.ctrlKey && !event.metaKey) {
      active = Math.min(count - 1, Math.max(0, active + steps[event.key]));
      reveal(active);
      event.preventDefault();
    } else if (event.key === "Enter" && active >= 0) {
      pick(active);
      event.preventDefault();
    }
  });
  new ResizeObserver(later).observe(element);

  return {
    element,
    // Sets the number of rows and the active row. The list scrolls to the active row, if any.
    fill(rows, at = -1) {
      count = rows;
      active = at;
      for (const item of drawn.values()) item.remove();
      drawn = new Map();
      space.style.height = `${count * height}px`;
      if (at >= 0) requestAnimationFrame(() => reveal(at, true));
      draw();
    },
    get active() {
      return active;
    },
  };
}

// A line of a listing, split into parts that the style sheet colors. `change` stands after the name,
// because the end of a long line is cut.
function codeParts(node, change = "") {
  const split = node.code.indexOf(" = ");
  const parts = [];
  if (node.op === "placeholder") {
    const colon = node.code.indexOf(": ");
    parts.push(
      el("b", {}, colon < 0 ? node.code : node.code.slice(0, colon)),
      colon < 0 ? "" : el("i", {}, node.code.slice(colon)),
    );
  } else if (split > 0) {
    const open = node.code.indexOf("(", split);
    const end = open < 0 ? node.code.length : open;
    const kind = node.collective || node.waits ? "op communicates" : "op";
    parts.push(
      el("b", {}, node.code.slice(0, split)),
      " = ",
      el("span", { class: kind }, node.code.slice(split + 3, end)),
      node.code.slice(end),
    );
  } else {
    parts.push(node.code);
  }
  if (node.note) parts.push(el("span", { class: "note" }, `  # ${node.note}`));
  if (change) parts.splice(1, 0, " ", el("span", { class: "chip retagged" }, change));
  return el("span", { class: "text" }, parts);
}
