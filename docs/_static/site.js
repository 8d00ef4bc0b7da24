// What scrolls sideways can be reached and scrolled by keyboard.
"use strict";
function reachable() {
  for (const region of document.querySelectorAll("pre, .table-wrapper")) {
    if (region.scrollWidth > region.clientWidth) region.tabIndex = 0;
    else region.removeAttribute("tabindex");
  }
}
addEventListener("load", reachable);
addEventListener("resize", reachable);
addEventListener("toggle", reachable, true);
