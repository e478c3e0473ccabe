# Adds to COMPREPLY what can stand for the last of these words, which follow the program.
_jaxdist_complete() {
    local names flags options words paths
    local command='' argument='' pending='' word
    _jaxdist_command ''
    while (($# > 1)); do
        word=$1
        shift
        if [[ -n $names ]]; then
            command="${command:+$command }$word"
            _jaxdist_command "$command" || return
        elif [[ $word == -- ]]; then
            # A script and its options.
            _jaxdist_add "${!#}" '' file
            return
        elif [[ $word == --*=* || " $flags " == *" $word "* ]]; then
            pending=''
        elif [[ $word == --* ]]; then
            pending=${word//_/-}
        elif [[ -n $pending ]]; then
            pending=''
        else
            argument=$word
        fi
    done

    local current=$1
    if [[ -n $names ]]; then
        _jaxdist_add "$current" "$names $flags"
    elif [[ $current == --*=* ]]; then
        word=${current%%=*}
        _jaxdist_values "$command:${word//_/-}" && _jaxdist_add "${current#*=}" "$words" "$paths" "$word="
    elif [[ $current == --* || ($current == -* && -z $pending) ]]; then
        _jaxdist_add "${current//_/-}" "$options $flags"
    elif [[ -n $pending ]]; then
        _jaxdist_values "$command:$pending" && _jaxdist_add "$current" "$words" "$paths"
    elif [[ -z $argument ]] && _jaxdist_values "$command:"; then
        _jaxdist_add "$current" "$words" "$paths"
    else
        _jaxdist_add "$current" "$options $flags"
    fi
}

# CURRENT WORDS [PATHS] [OPTION=]: adds the words that begin with CURRENT, and the paths of that kind.
_jaxdist_add() {
    local found prefix=''
    # Where "=" separates words, as it does by default, bash replaces only what follows it.
    [[ $COMP_WORDBREAKS == *=* ]] || prefix=${4-}
    while IFS= read -r found; do
        [[ -n $found ]] && COMPREPLY+=("$prefix$found")
    done < <(
        compgen -W "$2" -- "$1"
        case ${3-} in
        file) compgen -f -- "$1" ;;
        toml)
            compgen -d -- "$1"
            compgen -f -X '!*.toml' -- "$1"
            ;;
        folder) compgen -d -- "$1" ;;
        esac
    )
    # Directories get a slash, and names are quoted.
    [[ -z ${3-} ]] || compopt -o filenames 2>/dev/null
}

# Sets `line` to the words up to the cursor. Bash splits --mesh=data=4 and host:80 at "=" and ":"; here they are whole.
_jaxdist_line() {
    local i word last
    line=()
    for ((i = 0; i <= COMP_CWORD; i++)); do
        word=${COMP_WORDS[i]}
        last=$((${#line[@]} - 1))
        if ((i > 1)) && [[ $word == [=:] || ${COMP_WORDS[i - 1]} == [=:] ]]; then
            line[last]+=$word
        else
            line+=("$word")
        fi
    done
}

_jaxdist() {
    local line
    _jaxdist_line
    COMPREPLY=()
    _jaxdist_complete "${line[@]:1}"
}

# Completes python -m jaxdist and python -m jaxdist.COMMAND; anything else is left to what completed python before.
_jaxdist_python() {
    local line i
    _jaxdist_line
    COMPREPLY=()
    for ((i = 1; i + 2 < ${#line[@]}; i++)); do
        [[ ${line[i]} == -* ]] || break
        [[ ${line[i]} == -m ]] || continue
        case ${line[i + 1]} in
        jaxdist)
            _jaxdist_complete "${line[@]:i+2}"
            return
            ;;
        jaxdist.*)
            _jaxdist_complete "${line[i + 1]#jaxdist.}" "${line[@]:i+2}"
            return
            ;;
        esac
        break
    done
    [[ -z $_jaxdist_other ]] || "$_jaxdist_other" "$@"
}

# Remember what completed python before. The package bash-completion would load that at the first TAB.
if ! complete -p python &>/dev/null; then
    if declare -F _comp_load >/dev/null; then
        _comp_load python
    elif declare -F _completion_loader >/dev/null; then
        _completion_loader python
    fi
fi &>/dev/null
_jaxdist_spec=$(complete -p python 2>/dev/null)
if [[ $_jaxdist_spec != *_jaxdist_python* ]]; then
    _jaxdist_other=''
    if [[ $_jaxdist_spec == *' -F '* ]]; then
        _jaxdist_other=${_jaxdist_spec##* -F }
        _jaxdist_other=${_jaxdist_other%% *}
    fi
fi
unset _jaxdist_spec

complete -F _jaxdist jaxdist
complete -o bashdefault -o default -F _jaxdist_python python python3
