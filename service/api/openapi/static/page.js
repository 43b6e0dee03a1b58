// What RapiDoc lacks: a theme as the reader's system has it, names of fields, a way to scroll
// answers by keyboard, and Enter in the field of a token.
"use strict";

const viewer = document.querySelector("rapi-doc");
const dark = matchMedia("(prefers-color-scheme: dark)");
const adaptTheme = () => viewer.setAttribute("theme", dark.matches ? "dark" : "light");
adaptTheme();
dark.addEventListener("change", adaptTheme);
addEventListener("beforeprint", () => viewer.setAttribute("theme", "light"));
addEventListener("afterprint", adaptTheme);

// RapiDoc is made of elements within elements, each with a shadow root of its own.
const attachShadow = Element.prototype.attachShadow;
Element.prototype.attachShadow = function (options) {
  const root = attachShadow.call(this, options);
  const mend = () => {
    for (const field of root.querySelectorAll("input, select, textarea")) {
      field.ariaLabel ??= field.dataset.pname || field.placeholder || "Body";
    }
    for (const text of root.querySelectorAll("pre")) text.tabIndex = 0;
    // On a phone, where RapiDoc hides descriptions, they are below their fields.
    for (const text of innerWidth < 500 ? root.querySelectorAll(".key-descr") : []) {
      text.style.cssText += "; display: block; flex-basis: 100%";
      text.parentElement.style.flexWrap = "wrap";
    }
  };
  new MutationObserver(mend).observe(root, { childList: true, subtree: true });
  return root;
};

viewer.querySelector("button").addEventListener("click", () => {
  viewer.shadowRoot?.querySelector(".api-key-input")?.focus();
});
viewer.addEventListener("keydown", (event) => {
  const [field] = event.composedPath();
  if (event.key === "Enter" && field.matches(".api-key-input")) field.nextElementSibling.click();
});
