# Lists what abi_probe.c measures, read from llama.cpp's own headers: every field of the wanted
# structs, every constant of the wanted enums. Reading them here, and not naming fields in the
# probe, is what lets one probe fit every llama.cpp: a field it never heard of is still listed, and
# one that a version lacks is not asked for.
#
# usage: awk -f abi_items.awk HEADER... >abi_items.inc
# output: STRUCT(s), FIELD(s, f), END_STRUCT, CONSTANT(name) - one a line, in the header's order.

BEGIN {
    n = split("llama_model_params llama_context_params llama_batch llama_token_data " \
        "llama_token_data_array llama_model_tensor_buft_override llama_model_kv_override " \
        "llama_sampler_seq_config llama_chat_message ggml_backend_dev_props " \
        "ggml_backend_dev_caps", list, " ")
    for (i = 1; i <= n; i++) wanted[list[i]] = 1
    enums = "^(llama_.*|ggml_type|ggml_log_level|ggml_backend_dev_type)$"
    defines = "^LLAMA_(TOKEN_NULL|DEFAULT_SEED|STATE_SEQ_FLAGS_[A-Z_]*)$"
}

{
    if (in_comment) {
        if (!(i = index($0, "*/"))) next
        $0 = substr($0, i + 2)
        in_comment = 0
    }
    sub(/\/\/.*/, "")
    gsub(/\/\*[^*]*\*\//, "")
    if ((i = index($0, "/*")) > 0) {
        $0 = substr($0, 1, i - 1)
        in_comment = 1
    }
}

/^[ \t]*#/ {
    if ($1 == "#define" && NF >= 3 && $2 ~ defines && !($2 in seen)) {
        seen[$2] = 1
        print "CONSTANT(" $2 ")"
    }
    next
}

kind == "" && /^[ \t]*(typedef[ \t]+)?(struct|enum)[ \t]+[A-Za-z0-9_]+[ \t]*\{/ {
    head = $0
    sub(/[ \t]*\{.*/, "", head)
    n = split(head, word, /[ \t]+/)
    name = word[n]
    kind = word[n - 1]
    depth = 0
    body = ""
}

kind != "" {
    depth += gsub(/\{/, "{") - gsub(/\}/, "}")
    body = body " " $0
    if (depth > 0) next
    sub(/^[^{]*\{/, "", body)
    sub(/\}[^}]*$/, "", body)
    if (kind == "struct" && (name in wanted)) fields()
    if (kind == "enum" && name ~ enums) constants()
    kind = ""
}

function fields(    n, i, j, k, decl, part, f) {
    print "STRUCT(" name ")"
    # An anonymous union or struct adds its members to the outer one: only its braces go.
    gsub(/(union|struct)[ \t]*\{/, "", body)
    gsub(/\}/, "", body)
    n = split(body, decl, ";")
    for (i = 1; i <= n; i++) {
        if (decl[i] ~ /\([ \t]*\*/) {                  # pointer to function
            f = decl[i]
            sub(/^[^(]*\([ \t]*\*[ \t]*/, "", f)
            sub(/[^A-Za-z0-9_].*/, "", f)
            print "FIELD(" name ", " f ")"
            continue
        }
        k = split(decl[i], part, ",")
        for (j = 1; j <= k; j++) {
            f = part[j]
            sub(/[\[=].*/, "", f)
            gsub(/[ \t]+$/, "", f)
            sub(/.*[^A-Za-z0-9_]/, "", f)
            if (f != "") print "FIELD(" name ", " f ")"
        }
    }
    print "END_STRUCT"
}

function constants(    n, i, item, c) {
    n = split(body, item, ",")
    for (i = 1; i <= n; i++) {
        c = item[i]
        sub(/=.*/, "", c)
        gsub(/[ \t]/, "", c)
        if (c ~ /^[A-Za-z_][A-Za-z0-9_]*$/) print "CONSTANT(" c ")"
    }
}
