#!/bin/sh
# fresh_debian.sh SUITE [TARGET...]: do the README's commands work where nothing was set up?
#
# Makes an untouched Debian (SUITE: bookworm or trixie) that has python3, gcc, make and git and no
# more, clones this checkout's HEAD into it, and runs `make TARGET` there for each TARGET (demo and
# test unless named). Mirror, certificates and pip's settings are this machine's. Needs root and
# mmdebstrap. The Debian is made in the folder FRESH_ROOT and kept (a second run uses it as it is)
# if that is set, else in a folder of TMPDIR or /var/tmp that is removed at the end.
set -eu

if [ "${1:-}" = --inside ]; then # the second half, in namespaces of its own
    root=$2
    shift 2
    mount --bind "$root" "$root"
    mount -t proc proc "$root/proc"
    mount -t sysfs sysfs "$root/sys"
    mount --rbind /sys/fs/cgroup "$root/sys/fs/cgroup"
    mount -t devtmpfs devtmpfs "$root/dev"
    mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
    mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts "$root/dev/pts"
    mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
    mount -t tmpfs -o mode=755 tmpfs "$root/run"
    # CRIU refuses a process whose root is not its mount namespace's: chroot would not do.
    cd "$root"
    pivot_root . mnt
    umount -l /mnt
    cd /root/phosd
    for target; do
        begin=$(date +%s)
        make "$target"
        echo "make $target: $(($(date +%s) - begin)) s"
    done
    exit
fi

suite=$1
shift
[ $# -gt 0 ] || set -- demo test
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
here=$(cd "$(dirname "$0")" && pwd)
root=${FRESH_ROOT:-}
if [ -z "$root" ]; then
    root=$(mktemp -d "${TMPDIR:-/var/tmp}/fresh-$suite.XXXXXX")
    trap 'rm -rf --one-file-system "$root"' EXIT
fi
if [ ! -e "$root/etc/debian_version" ]; then
    "$here/debian_tree.sh" "$suite" "$root" python3,gcc,make,git,ca-certificates
fi
cp -L /etc/resolv.conf /etc/hosts "$root/etc/"
rm -rf "$root/root/phosd"
git clone --quiet --no-hardlinks "$here/../.." "$root/root/phosd"

# Of the environment, only what is needed to reach the registries comes along, and pytest's options.
for name in $(env | sed -n 's/^\([A-Za-z_]\+\)=.*/\1/p'); do
    case $name in
        PATH | TERM | PIP_* | PYTEST_ADDOPTS | SSL_CERT_* | *_proxy | *_PROXY) ;;
        *) unset "$name" ;;
    esac
done
export HOME=/root
# Its processes are nobody else's: none is met by others, and all end with the first of them.
unshare --mount --propagation private --pid --fork --kill-child \
    "$here/fresh_debian.sh" --inside "$root" "$@"
