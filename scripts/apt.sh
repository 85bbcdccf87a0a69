#!/bin/bash
# Sourced by scripts that install packages: runs apt-get after other instances.

# Limit on the wait for other instances' locks: an upgrade of a system takes minutes.
apt_wait_s=${APT_WAIT_S:-900}

# Runs apt-get without its progress. It waits for dpkg's lock by itself; where another apt holds the lock of the lists
# or of the archives it fails at once, and is run again.
apt_get() {
    local deadline=$((SECONDS + apt_wait_s)) errors told=
    until errors=$(LC_ALL=C apt-get -qq -o DPkg::Lock::Timeout="$apt_wait_s" "$@" 2>&1 >/dev/null); do
        if [[ $errors != *"Could not get lock"* ]] || ((SECONDS >= deadline)); then
            printf '%s\n' "$errors" >&2
            return 1
        fi
        [[ -n $told ]] || printf 'waiting for another apt: %s\n' "${errors%%$'\n'*}" >&2
        told=yes
        sleep 1
    done
}
