#!/bin/bash
# Runs a command as a pod's container does: processes, IPC and a host name of its own, a root that
# nobody can write to, user 10001 of group 10001, no rights. The caller gives it a network.
#
#     pod.sh NAME FOLDER MOUNTS COMMAND...
#
# FOLDER: an empty one. MOUNTS: lines of `ro SOURCE TARGET`, `rw SOURCE TARGET`, `memory BYTES TARGET`.
set -euo pipefail
name=$1 root=$2 mounts=$3
shift 3
hostname "$name"
mount -t tmpfs tmpfs "$root"
mkdir -p "$root"/{etc,usr,proc,dev,sys}
for link in bin sbin lib lib64; do ln -s "usr/$link" "$root/$link"; done
mount -t proc proc "$root/proc"
mount -t sysfs -o ro sysfs "$root/sys"
mount --rbind /dev "$root/dev"
bind() { # KIND SOURCE TARGET
    if [ "$1" = memory ]; then
        mkdir -p "$root$3"
        mount -t tmpfs -o "size=$2,mode=1777" tmpfs "$root$3"
        return
    fi
    if [ -d "$2" ]; then mkdir -p "$root$3"; else mkdir -p "$root$(dirname "$3")"; [ -e "$root$3" ] || touch "$root$3"; fi
    mount --bind "$2" "$root$3"
    if [ "$1" = ro ]; then mount -o remount,bind,ro "$root$3"; fi
}
bind ro /usr /usr
bind ro /etc /etc
while read -r kind source target; do bind "$kind" "$source" "$target"; done <"$mounts"
mount -o remount,ro "$root"
exec /usr/sbin/chroot "$root" setpriv --reuid 10001 --regid 10001 --clear-groups --no-new-privs \
    --bounding-set=-all --inh-caps=-all "$@"
