"use strict";

// What scrolls sideways can be reached and scrolled by keyboard.
function reachable() {
  for (const region of document.querySelectorAll("pre, .table-wrapper")) {
    if (region.scrollWidth > region.clientWidth) region.tabIndex = 0;
    else region.removeAttribute("tabindex");
  }
}

// A picture that is shown smaller than it is opens in full.
function enlargeable() {
  for (const picture of document.querySelectorAll("article img")) {
    if (picture.closest("a") || picture.naturalWidth <= picture.clientWidth) continue;
    const link = document.createElement("a");
    link.href = picture.src;
    picture.replaceWith(link);
    link.append(picture);
  }
}

addEventListener("load", reachable);
addEventListener("load", enlargeable);
addEventListener("resize", reachable);
addEventListener("toggle", reachable, true);
