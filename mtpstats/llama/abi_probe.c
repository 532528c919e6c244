/* Prints llama.cpp's binary interface as two members of a JSON object: "structs" (size of each
 * struct; offset and size of each field, in bytes) and "enums" (value of each constant).
 *
 * build_llama.sh compiles it with the compiler and the headers that made the library, and runs it
 * once; the binding builds its ctypes structures from what it printed. What to measure comes from
 * abi_items.inc, which abi_items.awk lists from the same headers.
 */
#include <stddef.h>
#include <stdio.h>

#include "llama.h"

static const char * between = "";

static void structs(void) {
    const char * inner = "";
#define STRUCT(s) \
    printf("%s\n  \"%s\": {\"size\": %zu, \"fields\": {", between, #s, sizeof(struct s)); \
    between = ","; \
    inner = "";
#define FIELD(s, f) \
    printf("%s\n    \"%s\": [%zu, %zu]", inner, #f, offsetof(struct s, f), \
           sizeof(((struct s *) 0)->f)); \
    inner = ",";
#define END_STRUCT printf("}}");
#define CONSTANT(c)
#include "abi_items.inc"
#undef STRUCT
#undef FIELD
#undef END_STRUCT
#undef CONSTANT
}

static void constants(void) {
#define STRUCT(s)
#define FIELD(s, f)
#define END_STRUCT
#define CONSTANT(c) \
    printf("%s\n  \"%s\": %lld", between, #c, (long long) (c)); \
    between = ",";
#include "abi_items.inc"
}

int main(void) {
    printf("\"structs\": {");
    structs();
    printf("},\n\"enums\": {");
    between = "";
    constants();
    printf("}");
    return ferror(stdout) || fflush(stdout) ? 1 : 0;
}
