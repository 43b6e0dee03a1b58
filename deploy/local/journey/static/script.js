// Shows what has changed, panel by panel, until nothing is waited for.
async function follow() {
  const shown = document.documentElement.cloneNode(true);
  while (document.querySelector("#status[data-waits]")) {
    await new Promise((resume) => setTimeout(resume, 700));
    if (document.hidden) continue;
    const response = await fetch(location.href).catch(() => null);
    if (!response?.ok) continue;
    const now = new DOMParser().parseFromString(await response.text(), "text/html");
    for (const part of now.querySelectorAll("#status, section")) {
      const before = shown.querySelector(`#${part.id}`);
      if (part.outerHTML === before.outerHTML) continue;
      document.getElementById(part.id).replaceWith(part.cloneNode(true));
      before.replaceWith(part);
    }
  }
}

follow();
