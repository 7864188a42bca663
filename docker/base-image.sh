#!/usr/bin/env bash
# Make the base image without a registry: Debian's Python, by debootstrap, under the name that the
# Dockerfile expects. For machines without a way out to one; a mirror of Debian's packages is enough.
#
#   sudo docker/base-image.sh [TAG] [MIRROR]
#
# TAG is python:3.11-slim-bookworm if not given, the Dockerfile's BASE. Certificates of CA_BUNDLE, a PEM
# file, go into the image: what a site's own package mirror or proxy is signed by.
set -euo pipefail

tag=${1:-python:3.11-slim-bookworm}
mirror=${2:-http://deb.debian.org/debian}
for needed in debootstrap docker; do
  command -v "$needed" >/dev/null || { echo "error: $needed is not installed: apt-get install $needed" >&2; exit 2; }
done
[ "$(id -u)" = 0 ] || { echo "error: debootstrap needs root: sudo $0 $*" >&2; exit 2; }
if [ -n "${CA_BUNDLE:-}" ] && ! [ -r "$CA_BUNDLE" ]; then
  echo "error: CA_BUNDLE=$CA_BUNDLE: cannot be read" >&2; exit 2
fi

root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$root" "$mirror" >"$root.log" 2>&1 \
  || { tail -20 "$root.log" >&2; echo "error: debootstrap failed; see $root.log" >&2; exit 1; }
rm -rf "$root.log" "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
if [ -n "${CA_BUNDLE:-}" ]; then
  cat "$CA_BUNDLE" >>"$root/etc/ssl/certs/ca-certificates.crt"
fi
tar -C "$root" -c . | docker import --change 'CMD ["python3"]' - "$tag"
echo "made $tag"
