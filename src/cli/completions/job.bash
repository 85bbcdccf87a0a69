    # The job's own words.
    local job
    for ((job = 1; job < COMP_CWORD; job++)); do
        if [[ ${COMP_WORDS[job]} == -- ]]; then
            COMPREPLY=()
            if declare -F _command_offset >/dev/null; then
                _command_offset $((job + 1))
            elif ((job + 1 == COMP_CWORD)); then
                COMPREPLY=($(compgen -c -- "$2"))
            fi
            return 0
        fi
    done

