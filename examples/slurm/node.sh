# shellcheck shell=bash
# Checks one node of a training job before ranks start, and prints a line `NODE: PROBLEM` for each problem. train.sh runs this text on
# every node, outside the container. $1: host of the rendezvous; $2 and $3: PROJECT_DIR and NETWORK_INTERFACE.
node="${SLURMD_NODENAME:-$(hostname)}"

knows() {
    timeout 20 getent ahosts "$1" >/dev/null
}

if [[ ! -f "$2/tools/train.py" ]]; then echo "$node: no file $2/tools/train.py (PROJECT_DIR)"; fi
if ! knows "$1"; then echo "$node: does not know the name $1"; fi
if [[ -z "$3" ]]; then
    # Gloo uses the address of the node's own name, and the loopback device if the name is unknown
    if ((SLURM_JOB_NUM_NODES > 1)) && ! knows "$(hostname)"; then
        echo "$node: does not know its own name $(hostname), and NETWORK_INTERFACE is not set"
    fi
elif [[ "$3" =~ ^[[:alnum:]] ]]; then
    for name in ${3//,/ }; do
        if [[ ! -e "/sys/class/net/$name" ]]; then echo "$node: no network interface $name (NETWORK_INTERFACE)"; fi
    done
fi
