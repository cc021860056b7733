"""Our scripts inside a Docker sandbox: its first process, and the checks of whether it is usable."""

# The first process of each container. Arguments: its time to live in seconds, the signal that asks the command to end,
# the command. Needs only a POSIX shell and `sleep`, and holds whether or not it has process id 1.
#
# - A first process gets no signal that it has no trap for; ALRM is how the watchdog ends it, and the kernel then kills
#   whatever else runs inside, so that a command that ignores TERM ends as well.
# - The watchdog, and the `sleep` that inherits this from it, ignores what a program inside may send to every shell or
#   every sleep; one that is killed all the same is started anew.
# - `wait` returns early after a trap. While it waits, the shell reaps what lost its parent.
# - What a shell starts in the background has no standard input and ignores INT and QUIT unless it handles them.
# - It never writes by itself: nobody may read its output any more, and a write that waits cannot be ended by a trap.
FIRST_PROCESS = """\
ttl=$1 signal=$2 child= stopping=
shift 2
[ $# -gt 0 ] || set -- sleep $((ttl + 60))
stop() {
    stopping=1
    [ -z "$child" ] || kill -"$signal" "$child" 2>/dev/null
}
trap stop TERM
trap 'kill -KILL "$child" 2>/dev/null; exit 124' ALRM
(
    trap '' HUP INT QUIT TERM USR1 USR2
    until sleep "$ttl"; do sleep 1; done
    kill -ALRM $$
) &
"$@" &
child=$!
[ -z "$stopping" ] || stop
while
    stopping=
    wait "$child"
    code=$?
    [ -n "$stopping" ] && kill -0 "$child" 2>/dev/null
do :; done
if [ -n "$stopping" ]; then
    wait "$child" 2>/dev/null
    last=$?
    [ $last = 127 ] || code=$last
fi
echo "thunderagent: the command ended with exit code $code" >&2 &
wait $!
exit $code
"""

# Run inside until it succeeds: one command there instead of one call to the engine for each check.
_SLEEP = 'sleep "$interval" 2>/dev/null || sleep 1'  # not every `sleep` accepts fractions of a second
UNTIL_COMMAND = f"""\
command=$1 interval=$2
until sh -c "$command" >/dev/null 2>&1; do {_SLEEP}; done
"""
# The kernel inside is asked whether somebody listens. The published port would not tell: the engine's own proxy accepts
# there before anybody does inside. 0A is the state of listening; the excluded addresses are loopback. After its header
# a table lists listeners, and then connections, of which there may be thousands: they are not read.
UNTIL_PORT = f"""\
port=$1 interval=$2
is_open() {{
    for table in /proc/net/tcp /proc/net/tcp6; do
        [ -r "$table" ] || continue
        while read -r _ address _ state _; do
            case $address/$state in
                0100007F:"$port"/0A | *0100007F:"$port"/0A | 00000000000000000000000001000000:"$port"/0A) ;;
                *:"$port"/0A) return 0 ;;
                */0A | */st) ;;
                *) break ;;
            esac
        done <"$table"
    done
    return 1
}}
until is_open; do {_SLEEP}; done
"""
