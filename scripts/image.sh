#!/usr/bin/env bash
# Runs the Dockerfile where there is neither a container runtime nor a registry, then runs what it made as a strict cluster would: a read-only
# root, an unknown user, no HOME, no network. scripts/image.sh [cu13|cu12] [WORDS OF k3cuda compile]
# Needs root, buildah, debootstrap, iproute2, a Debian mirror and a package index. In place of python:3.13-slim-trixie stands Debian's own
# Python 3.13 of trixie, so the sizes of base and image are near the real ones and not the same.
set -euo pipefail
cd "$(dirname "$0")/.."
line=${1:-cu13} base=localhost/k3cuda-base:trixie image=localhost/k3cuda:${1:-cu13}
work=$(mktemp -d)
container=
finish() {
    if [ -n "$container" ]; then buildah rm "$container" >/dev/null; fi
    rm -rf "$work"
}
trap finish EXIT
export BUILDAH_ISOLATION=chroot

if ! buildah inspect "$base" >/dev/null 2>&1; then
    debootstrap --variant=minbase --include=python3,python3-venv,python3-pip,ca-certificates trixie "$work/root" http://deb.debian.org/debian
    chroot "$work/root" apt-get clean
    rm -rf "$work"/root/var/lib/apt/lists/* "$work"/root/usr/share/{doc,man,locale}
    ln -s python3 "$work/root/usr/bin/python"
    made=$(buildah from scratch)
    buildah add -q "$made" "$work/root" /
    buildah commit -q "$made" "$base"
    buildah rm "$made" >/dev/null
fi

mkdir "$work/context"
git ls-files -z --cached --others --exclude-standard | tar -c --null -T - | tar -x -C "$work/context"
python3 -m pip wheel --quiet --no-deps --wheel-dir "$work/context/dist" "$work/context"
# The host's certificates, for a package index that only it knows.
buildah bud --format docker --build-arg PYTHON_IMAGE="$base" --build-arg CUDA_LINE="$line" ${2:+--build-arg "COMPILE=$2"} \
    --volume /etc/ssl/certs/ca-certificates.crt:/etc/ssl/certs/ca-certificates.crt:ro --tag "$image" "$work/context"

container=$(buildah from "$image")
root=$(buildah mount "$container")
mapfile -t environment < <(buildah inspect --type image --format '{{range .OCIv1.Config.Env}}{{println .}}{{end}}' "$image" | grep -v -e '^HOME=' -e '^$')

# Namespaces of its own for mounts, network and processes; the image's own environment but for HOME.
strictly() {
    # shellcheck disable=SC2016
    root=$root unshare --mount --net --pid --fork bash -c '
        set -euo pipefail
        ip link set lo up
        mount --bind "$root" "$root"
        mount -t tmpfs tmpfs "$root/tmp"
        mount --rbind /dev "$root/dev"
        mount -t proc proc "$root/proc"
        mount -o remount,ro,bind "$root"
        exec env -i "${@:1:$(($# - 1))}" /usr/sbin/chroot --userspec=4711:4711 --groups= "$root" /bin/sh -ec "${!#}"' strictly "${environment[@]}" "$1"
}

strictly 'id; if touch /opt/k3cuda/x 2>/dev/null; then echo "the root is not read-only" >&2; exit 1; fi'
strictly 'k3cuda info; k3cuda generate demo -p hi -n 8 --seed 1; echo'
strictly 'k3cuda plan kimi-k3 --tp 16 | head -c 1 >/dev/null; k3cuda compile --arch sm_90a --rows 1 --output /tmp/cubin; find /tmp -user 4711 -name kernel.cubin | head -2'
# The health check of the Dockerfile, word for word, against a server that ends by SIGTERM.
health=$(sed -n 's/^    CMD \(\[.*\]\)$/\1/p' Dockerfile | python3 -c 'import json, shlex, sys; print(shlex.join(json.load(sys.stdin)))')
strictly "k3cuda serve demo & server=\$!; for i in 1 2 3 4 5 6 7 8 9 10; do sleep 3; if $health 2>/dev/null; then break; fi; done
          $health; kill -TERM \$server; code=0; wait \$server || code=\$?; test \$code = 143; echo health and SIGTERM are right"
for part in "$root" "$root/opt/k3cuda" "$root/opt/k3cuda/cubin"; do du -s --apparent-size --block-size=1000000 "$part"; done   # 10^6 bytes
