# operate service|worker COMMAND: runs one of our commands in the cluster, in a Job made from the CronJob `operator`, and
# prints the Job's log. Needs kubectl and jq. deploy/operate.md lists the commands.
operate() {
    [ $# -gt 0 ] || { echo 'usage: operate service|worker COMMAND' >&2; return 2; }
    namespace=${NAMESPACE:-calculation-requests}
    job=$(kubectl -n "$namespace" create job "operator-$(date +%s)" --from=cronjob/operator --dry-run=client -o json |
        jq --arg name "$USER" 'def verbatim: gsub("[$]"; "$$"); .spec.template.spec.containers[0] |=
            (.args = ($ARGS.positional | map(verbatim)) | .env += [{name: "LOGNAME", value: ($name | verbatim)}])' \
            --args -- "$@" |
        kubectl -n "$namespace" create -o name -f -) || return
    until ended=$(kubectl -n "$namespace" get "$job" -o jsonpath='{.status.succeeded}{.status.failed}') || return
        [ -n "$ended" ]
    do sleep 1; done
    kubectl -n "$namespace" logs "$job"
    [ "$(kubectl -n "$namespace" get "$job" -o jsonpath='{.status.succeeded}')" = 1 ]
}
