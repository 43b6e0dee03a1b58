// Shows what has changed, part by part, until nothing is waited for. Stands at the step that asks for something new.
async function follow() {
  const shown = document.documentElement.cloneNode(true);
  while (document.querySelector("#status[data-waits]")) {
    await new Promise((resume) => setTimeout(resume, 700));
    if (document.hidden) continue;
    const response = await fetch(location.href).catch(() => null);
    if (!response?.ok) continue;
    const now = new DOMParser().parseFromString(await response.text(), "text/html");
    const asked = document.getElementById("status").textContent;
    for (const part of now.querySelectorAll("#picture, #status, section")) {
      const before = shown.querySelector(`#${part.id}`);
      if (part.outerHTML === before.outerHTML) continue;
      document.getElementById(part.id).replaceWith(part.cloneNode(true));
      before.replaceWith(part);
    }
    if (document.getElementById("status").textContent === asked) continue;
    document.querySelector("section.now").scrollIntoView();
  }
}

follow();
