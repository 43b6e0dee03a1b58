// What RapiDoc lacks: a theme as the reader's system has it, names of credentials and fields, and a way
// to scroll answers by keyboard.
"use strict";

const viewer = document.querySelector("rapi-doc");
const dark = matchMedia("(prefers-color-scheme: dark)");
const adaptTheme = () => viewer.setAttribute("theme", dark.matches ? "dark" : "light");
adaptTheme();
dark.addEventListener("change", adaptTheme);

// RapiDoc would title each credential "HTTP Bearer".
const nameOf = (scheme) => scheme.replace("_", " ").replace("api", "API");
viewer.addEventListener("spec-loaded", ({ detail }) => {
  for (const scheme of detail.securitySchemes) scheme.typeDisplay = nameOf(scheme.securitySchemeId);
  viewer.requestUpdate();
});

// RapiDoc is made of elements within elements, each with a shadow root of its own.
const attachShadow = Element.prototype.attachShadow;
Element.prototype.attachShadow = function (options) {
  const root = attachShadow.call(this, options);
  const mend = () => {
    for (const field of root.querySelectorAll("input, select, textarea")) {
      const credential = field.matches(".api-key-input") && nameOf(field.classList[1]);
      field.ariaLabel ??= field.dataset.pname || credential || field.placeholder || "Body";
    }
    for (const text of root.querySelectorAll("pre")) text.tabIndex = 0;
    // RapiDoc counts every credential as an API key.
    for (const { childNodes } of root.querySelectorAll("#auth > div *, #auth .blue-text")) {
      for (const text of childNodes) {
        text.data = text.data?.replace(/API key(?= a)/, "credential").replace(/ API KEYS|Key (?=A)/, "");
      }
    }
    // On a phone, where RapiDoc hides descriptions, they are below their fields.
    for (const text of innerWidth < 500 ? root.querySelectorAll(".key-descr") : []) {
      text.style.cssText += "; display: block; flex-basis: 100%";
      text.parentElement.style.flexWrap = "wrap";
    }
  };
  new MutationObserver(mend).observe(root, { childList: true, subtree: true });
  return root;
};
