# shellcheck shell=bash
# What one node of a training job says before ranks start: a line `NODE: what is wrong` for each fault. Every node runs this text,
# outside the container; see train.sh. $1: where ranks meet; $2 and $3: PROJECT_DIR and NETWORK_INTERFACE.
node="${SLURMD_NODENAME:-$(hostname)}"

knows() {
    timeout 20 getent ahosts "$1" >/dev/null
}

if [[ ! -f "$2/tools/train.py" ]]; then echo "$node: no file $2/tools/train.py (PROJECT_DIR)"; fi
if ! knows "$1"; then echo "$node: does not know the name $1"; fi
if [[ -z "$3" ]]; then
    # Gloo takes the address that belongs to the node's own name, and without one that of the loopback device
    if ((SLURM_JOB_NUM_NODES > 1)) && ! knows "$(hostname)"; then
        echo "$node: does not know its own name $(hostname), and NETWORK_INTERFACE is not set"
    fi
elif [[ "$3" =~ ^[[:alnum:]] ]]; then
    for name in ${3//,/ }; do
        if [[ ! -e "/sys/class/net/$name" ]]; then echo "$node: no network interface $name (NETWORK_INTERFACE)"; fi
    done
fi
