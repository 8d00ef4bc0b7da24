// What results need beyond Gradio: notes beside marks, arrow keys among them, tables that sort, copies, and "back".
(() => {
  const tip = document.createElement("div");
  tip.id = "tip";
  tip.hidden = true;
  tip.setAttribute("aria-hidden", "true");
  let shown = null;

  function show(mark) {
    shown = mark;
    if (!tip.isConnected) document.body.append(tip);
    tip.replaceChildren();
    for (const [kind, text] of [["b", mark.dataset.tip], ["span", mark.dataset.tipFigures], ["span", mark.dataset.tipText]]) {
      if (!text) continue;
      const line = document.createElement(kind);
      line.textContent = text;
      tip.append(line);
    }
    tip.hidden = false;
    const at = mark.getBoundingClientRect(), own = tip.getBoundingClientRect(), edge = 8;
    const left = at.left + at.width / 2 - own.width / 2;
    const above = at.top - own.height - 12;
    tip.style.left = `${Math.max(edge, Math.min(left, innerWidth - own.width - edge))}px`;
    tip.style.top = `${above >= edge ? above : Math.min(at.bottom + 12, innerHeight - own.height - edge)}px`;
  }

  function hide() { tip.hidden = true; shown = null; }

  const marked = (event) => event.target instanceof Element ? event.target.closest("[data-tip]") : null;
  document.addEventListener("mouseover", (event) => { const mark = marked(event); mark ? show(mark) : hide(); });
  document.addEventListener("focusin", (event) => { const mark = marked(event); mark ? show(mark) : hide(); });
  // The browser scrolls to a mark that gets the focus: its note moves along.
  const scrolled = () => shown && shown === document.activeElement ? show(shown) : hide();
  document.addEventListener("scroll", scrolled, { capture: true, passive: true });

  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && shown) return hide();
    const mark = event.target instanceof Element ? event.target.closest(".plot .mark") : null;
    if (!mark) return;
    const place = (one) => one.getBoundingClientRect().left;
    const marks = [...mark.closest(".plot").querySelectorAll(".mark")].sort((a, b) => place(a) - place(b));
    const step = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[event.key];
    const end = { Home: marks[0], End: marks.at(-1) }[event.key];
    const next = end ?? (step ? marks[(marks.indexOf(mark) + step + marks.length) % marks.length] : null);
    if (!next) return;
    event.preventDefault();
    for (const one of marks) one.tabIndex = one === next ? 0 : -1;
    next.focus();
  });

  function sort(button) {
    const heading = button.closest("th"), table = heading.closest("table");
    const column = heading.cellIndex, numbers = heading.classList.contains("number");
    const down = heading.getAttribute("aria-sort") === "ascending";
    for (const one of heading.parentElement.cells) one.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", down ? "descending" : "ascending");
    const value = (row) => row.cells[column].dataset.value;
    const compare = (a, b) => numbers ? value(a) - value(b) : value(a).localeCompare(value(b), undefined, { numeric: true });
    const rows = [...table.tBodies[0].rows].sort((a, b) => down ? compare(b, a) : compare(a, b));
    table.tBodies[0].append(...rows);
  }

  async function copy(button) {
    const text = button.dataset.copy === "address" ? location.href : button.parentElement.querySelector("code").textContent;
    const said = button.closest(".card").querySelector(".said");
    try {
      await navigator.clipboard.writeText(text);
      said.textContent = "Copied";
    } catch {
      said.textContent = "The browser does not allow copying here: select the text, or the address above";
    }
  }

  document.addEventListener("click", (event) => {
    const button = event.target instanceof Element ? event.target.closest("button") : null;
    if (!button) return;
    if (button.closest(".sortable thead")) sort(button);
    else if (button.dataset.copy) copy(button);
  });

  // The fields of an earlier address are set by the server.
  addEventListener("popstate", () => location.reload());
})();
