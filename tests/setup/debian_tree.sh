#!/bin/sh
# debian_tree.sh SUITE ROOT PACKAGES: a Debian of its own in the folder ROOT, with PACKAGES (a list
# with commas) and no more. Mirror, certificates and pip's settings are this machine's. Needs root
# and mmdebstrap.
set -eu

suite=$1 root=$2 packages=$3
fail() {
    echo "debian_tree.sh: $*" >&2
    exit 1
}
command -v mmdebstrap >/dev/null || fail "mmdebstrap is missing; apt-get install mmdebstrap"
# shellcheck disable=SC2016
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Label: Debian' | head -n 1)
[ -n "$mirror" ] || fail "apt knows no Debian mirror here; apt-get update"
fetching=$(mktemp)
trap 'rm -f "$fetching"' EXIT
apt-config dump | grep -E '^Acquire::(http|https|Check-|Retries)' >"$fetching" || true
mmdebstrap --quiet --variant=minbase --include="$packages" --aptopt="$fetching" \
    "$suite" "$root" "$mirror"
if [ -x "$root/usr/sbin/update-ca-certificates" ]; then
    cp -r /usr/local/share/ca-certificates "$root/usr/local/share/"
    chroot "$root" update-ca-certificates >/dev/null
fi
[ ! -e /etc/pip.conf ] || cp /etc/pip.conf "$root/etc/"
