# Prints the words between the program and the cursor's word; fails if the program is not jaxdist.
function __jaxdist_line
    set -l line (commandline -opc)
    if not string match -qr '(^|/)python3?$' -- $line[1]
        string split \n -- $line[2..]
        return 0
    end
    # python -m jaxdist, or python -m jaxdist.COMMAND
    set -l at (contains -i -- -m $line)
    or return 1
    set -l module $line[(math $at + 1)]
    string match -qr '^jaxdist(\.|$)' -- "$module"
    or return 1
    string replace -r '^jaxdist\.?' '' -- $module | string match -v ''
    string split \n -- $line[(math $at + 2)..]
    return 0
end

# Prints what can stand for the word at the cursor, with descriptions behind tabs.
function __jaxdist_complete
    set -l command ''
    set -l argument ''
    set -l pending ''
    set -l names (__jaxdist_names '')
    for word in (__jaxdist_line)
        if set -q names[1]
            contains -- $word (string split -f 1 \t -- $names)
            or return
            set command (string trim -- "$command $word")
            set names (__jaxdist_names $command)
        else if test "$word" = --
            # A script and its options.
            __fish_complete_path (commandline -ct)
            return
        else if string match -qr '^--.*=' -- $word
            or contains -- $word (__jaxdist_flags $command | string split -f 1 \t)
            set pending ''
        else if string match -q -- '--*' $word
            set pending (string replace -a _ - -- $word)
        else if test -n "$pending"
            set pending ''
        else
            set argument $word
        end
    end

    set -l current (commandline -ct)
    if set -q names[1]
        printf '%s\n' $names
        __jaxdist_flags $command
    else if string match -q -- '--*=*' $current
        set -l option (string split -m 1 -f 1 = -- $current)
        set -l value (string split -m 1 -f 2 = -- $current)
        for found in (__jaxdist_values $command:(string replace -a _ - -- $option) "$value")
            printf '%s=%s\n' $option $found
        end
    else if string match -q -- '--*' $current
        or string match -q -- '-*' $current; and test -z "$pending"
        __jaxdist_options $command
        __jaxdist_flags $command
    else if test -n "$pending"
        __jaxdist_values $command:$pending "$current"
    else if test -z "$argument"; and test -n "$(__jaxdist_words $command:; __jaxdist_paths $command:)"
        __jaxdist_values $command: "$current"
    else
        __jaxdist_options $command
        __jaxdist_flags $command
    end
end

# Prints the words of COMMAND:OPTION, and its paths that begin with the value.
function __jaxdist_values --argument-names key value
    __jaxdist_words $key
    switch "$(__jaxdist_paths $key)"
        case file
            __fish_complete_path "$value"
        case toml
            __fish_complete_path "$value" | string match -r --entire '(?:/|\.toml)(?:\t|$)'
        case folder
            __fish_complete_directories "$value"
    end
end

complete -c jaxdist -f -a '(__jaxdist_complete)'
for python in python python3
    complete -c $python -n '__jaxdist_line >/dev/null' -f -a '(__jaxdist_complete)'
end
