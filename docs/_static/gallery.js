// Fields that narrow the table of ready-made configurations; without this script it is shown whole.
"use strict";
{
  const place = document.getElementById("gallery-filter");
  const rows = [...place.closest("section").querySelectorAll("tbody tr")];
  const shown = document.createElement("output");
  const fields = [
    ["words", "text", "such as llama A100"],
    ["most GB", "number", ""],
  ].map(([name, type, hint]) => {
    const label = document.createElement("label");
    const field = document.createElement("input");
    field.type = type;
    field.min = 0;
    field.placeholder = hint;
    label.append(name, " ", field);
    place.append(label, " ");
    field.addEventListener("input", narrow);
    return field;
  });
  place.append(shown);
  narrow();

  function narrow() {
    const words = fields[0].value.toLowerCase().split(/\s+/);
    const most = parseFloat(fields[1].value || Infinity);
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word)) || parseFloat(row.cells[3].textContent) > most;
    }
    shown.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length}`;
  }
}
