# Completes the words of a command line, of which the first is the program.
_jaxdist() {
    local -a names flags options words_of
    local paths command='' argument='' pending='' word
    _jaxdist_command ''
    for word in "${(@Q)words[2,CURRENT - 1]}"; do
        if (($#names)); then
            command="${command:+$command }$word"
            _jaxdist_command "$command" || return 1
        elif [[ $word == -- ]]; then
            # A script and its options.
            _files
            return
        elif [[ $word == --*=* || -n ${flags[(r)$word:*]} ]]; then
            pending=''
        elif [[ $word == --* ]]; then
            pending=${word//_/-}
        elif [[ -n $pending ]]; then
            pending=''
        else
            argument=$word
        fi
    done

    local current=${words[CURRENT]}
    if (($#names)); then
        _describe -t commands command names
        [[ $current != -* ]] || _describe -o option flags
    elif [[ $current == --*=* ]]; then
        word=${current%%=*}
        compset -P 1 '*='
        _jaxdist_values "$command:${word//_/-}" && _jaxdist_add
    elif [[ $current == --* || ($current == -* && -z $pending) ]]; then
        _describe -o option options -- flags -M 'm:_=-'
    elif [[ -n $pending ]]; then
        _jaxdist_values "$command:$pending" && _jaxdist_add
    elif [[ -z $argument ]] && _jaxdist_values "$command:"; then
        _jaxdist_add
    else
        # Without -o, which offers nothing before the first hyphen is typed.
        _describe -t arguments option options -- flags
    fi
}

# Adds the words of `words_of`, and the paths of the kind that `paths` names.
_jaxdist_add() {
    compadd -a words_of
    case $paths in
    file) _files ;;
    toml) _files -g '*.toml' ;;
    folder) _files -/ ;;
    esac
}

# Completes python -m jaxdist and python -m jaxdist.COMMAND; anything else is left to what completed python before.
_jaxdist_python() {
    local i module
    for ((i = 2; i + 1 < CURRENT; i++)); do
        [[ ${words[i]} == -* ]] || break
        [[ ${words[i]} == -m ]] || continue
        module=${words[i + 1]}
        if [[ $module == jaxdist || $module == jaxdist.* ]]; then
            words=(jaxdist ${${module#jaxdist}#.} "${(@)words[i + 2, -1]}")
            ((CURRENT -= i - ($#module > 7)))
            _jaxdist
            return
        fi
        break
    done
    ${_jaxdist_other:-_default} "$@"
}

if ! (($+functions[compdef])); then
    autoload -Uz compinit && compinit
fi
if [[ ${_comps[python]:-} != _jaxdist_python ]]; then
    _jaxdist_other=${_comps[python]:-_python}
    (($+functions[$_jaxdist_other])) || _jaxdist_other=_default
fi
compdef _jaxdist jaxdist
compdef _jaxdist_python python python3
