"""The scripts of the deployment: `operate`, with a script that answers for the cluster, and dev's issuer."""

import asyncio
import shutil
import subprocess
import sys

import msgspec
import pytest

from deploy.local.machine.folders import CHECKOUT
from tests.deploy.manifests import OVERLAYS, configuration, container_of, pod_of, the_one, workloads
from tests.harness.examples import A_REQUEST, CONVEYANCER
from tests.harness.in_process import api_client, run

WORDS = ["service", "conveyancer", "add", "acme", "--name", 'Acme & Sons\' "Firm"', "--note", "-"]
WORDS += ["-n", "--", "Ca$$h $(DATABASE_URL)", "two\nlines\n", ""]
# Makes the Job as `kubectl create job --from=cronjob/operator` does, and shows what the cluster gets.
KUBECTL = """\
#!/bin/sh
case "$*" in
    *" create job operator-"*" --from=cronjob/operator --dry-run=client -o json") cat job.json ;;
    *" create -o name -f -") cat > created.json; echo job.batch/operator-1 ;;
    *" get job.batch/operator-1 -o jsonpath={.status.succeeded}{.status.failed}") echo 1 ;;
    *" get job.batch/operator-1 -o jsonpath={.status.succeeded}") echo "$SUCCEEDED" ;;
    *" logs job.batch/operator-1") echo its log ;;
    *) echo "kubectl $*" >&2; exit 1 ;;
esac
"""


@pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")
@pytest.mark.parametrize("overlay", ["external", "production"])
@pytest.mark.parametrize(("succeeded", "status"), [("1", 0), ("", 1)])
def test_operate_runs_the_words_as_the_login_and_fails_with_the_command(overlay, succeeded, status, tmp_path):
    template = workloads(overlay)["operator"]["spec"]["jobTemplate"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "operator-1"}, **template}
    (tmp_path / "job.json").write_bytes(msgspec.json.encode(job))
    (tmp_path / "kubectl").write_text(KUBECTL)
    (tmp_path / "kubectl").chmod(0o755)
    ran = subprocess.run(
        ["/bin/sh", "-uc", f'. {CHECKOUT}/deploy/operate.sh\noperate "$@"', "sh", *WORDS],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "USER": "grace", "SUCCEEDED": succeeded},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    created = msgspec.json.decode((tmp_path / "created.json").read_bytes())
    container = container_of(created)
    assert (ran.returncode, ran.stdout, ran.stderr) == (status, "its log\n", "")
    assert [word.replace("$$", "$") for word in container.pop("args")] == WORDS  # Kubernetes replaces $$.
    assert container["env"].pop() == {"name": "LOGNAME", "value": "grace"}
    assert container == {name: value for name, value in container_of(job).items() if name != "args"}
    assert pod_of(created)["serviceAccountName"] == "operator"


def test_template_runs_nothing_by_itself_and_repeats_no_command():
    for operator in (workloads(overlay)["operator"] for overlay in OVERLAYS):
        assert operator["spec"]["suspend"] is True
        assert operator["spec"]["jobTemplate"]["spec"]["backoffLimit"] == 0
        assert pod_of(operator)["restartPolicy"] == "Never"


async def test_token_that_is_signed_in_the_apis_pod_of_dev_opens_the_api(service_settings, tmp_path):
    settings = configuration("dev")
    script = the_one("dev", "ConfigMap", "issuer-script")["data"]["issuer.py"]
    await asyncio.to_thread(subprocess.run, [sys.executable, "-c", script, tmp_path], check=True)
    words = ("service", "token", CONVEYANCER, "--key", str(tmp_path / "key.pem"))
    token = (await run(*words, environment=settings)).output.strip()
    of_auth = {name: settings[name.upper()] for name in ("auth_issuer", "auth_audience")}
    of_auth["auth_jwks_url"] = f"file://{tmp_path}/jwks.json"
    async with api_client(msgspec.structs.replace(service_settings, **of_auth), token) as client:
        assert (await client.post("/v1/request", json=A_REQUEST)).is_success
