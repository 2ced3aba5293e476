#!/bin/sh
# system_packages.sh [boot | release | image | containers | slurm | disks]: install the system packages that
# are missing, and only those; with `boot` also what the tests in a booted system need, with `release`
# what checks the package, its repository and the DaemonSet, with `image` what makes the OCI image,
# with `containers` the runtimes whose containers are tested, with `slurm` that and its headers, with
# `disks` what makes file systems.
# Prints one line.
set -eu

missing=""
need() { # need TEST PACKAGE...: the packages are missing unless the test succeeds
    test=$1
    shift
    sh -c "$test" >/dev/null 2>&1 || missing="$missing $*"
}
tool() { need "command -v $1" "$2"; }

PATH="$PATH:/usr/sbin:/sbin"
tool gcc gcc
tool g++ g++
tool ccache ccache
tool patchelf patchelf
tool dbus-daemon dbus-daemon
tool busctl systemd
tool gdbus libglib2.0-bin
need "test -x /usr/lib/polkit-1/polkitd" polkitd
tool groff groff-base
tool ip iproute2
tool ps procps
tool tmux tmux
need "${PYTHON:-python3} -c 'import ensurepip, venv'" python3-venv
if [ "${1:-}" = boot ]; then
    tool mmdebstrap mmdebstrap
    tool systemd-nspawn systemd-container
fi
if [ "${1:-}" = release ]; then
    tool lintian lintian
    tool kubectl kubernetes-client
    tool gpg gpg
    tool reprepro reprepro
fi
[ "${1:-}" != image ] || tool buildah buildah
# From Debian 13 on neither buildah nor podman begins anything without it.
case "${1:-}$(cat /etc/debian_version)" in
    image12* | containers12*) ;;
    image* | containers*) need "test -x /usr/lib/podman/netavark" netavark ;;
esac
tool runc runc
tool iptables iptables # CRIU calls iptables-restore for a container with a network of its own
tool ssh-keygen openssh-client
if [ "${1:-}" = containers ]; then
    tool podman podman
    tool ctr containerd
fi
if [ "${1:-}" = slurm ]; then
    tool munged munge
    tool slurmctld slurm-wlm
    need "test -f /usr/include/slurm/spank.h" libslurm-dev
fi
if [ "${1:-}" = disks ]; then
    tool mkfs.xfs xfsprogs
    tool mkfs.btrfs btrfs-progs
fi
need "ls /usr/share/keyrings/debian-archive-keyring.*" debian-archive-keyring

if [ -z "$missing" ]; then
    echo "system packages: all there"
    exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "system packages: missing:$missing; install them and try again" >&2
    exit 1
fi
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
# A machine that has just started may be busy with its own upgrades: wait for the lock.
# shellcheck disable=SC2086
install() {
    apt-get install -y -qq --no-install-recommends -o DPkg::Lock::Timeout=300 $missing >"$log" 2>&1
}
install || { apt-get update -qq >"$log" 2>&1 && install; } || {
    cat "$log"
    echo "system packages: apt-get could not install$missing" >&2
    exit 1
}
rm -f "$log"
echo "system packages: installed$missing"
