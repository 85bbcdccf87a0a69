
# The job's own words.
function __fish_ckpt_run_job
    set -l words (commandline -opc)
    set -l first (math (contains -i -- -- $words) + 1)
    set -l before
    test $first -le (count $words)
    and set before (string escape -- $words[$first..-1])
    complete -C (string join -- ' ' $before (commandline -ct))
end
complete -c ckpt-run -n "contains -- -- (commandline -opc)" -x -a "(__fish_ckpt_run_job)"
