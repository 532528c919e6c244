#!/usr/bin/env bash
# Builds llama.cpp's libllama and its ggml libraries as shared libraries for one backend, and
# writes beside them the manifest of their binary interface that mtpstats loads them by.
# Runs on bash 3.2 (macOS) and later; needs cmake, a C++ compiler, and python3 or make.
# shellcheck disable=SC2015,SC2086,SC2329  # a && b || c as meant; unquoted words hold no blanks; functions run by step
{ # read to its end before it runs, so that an edit or a git pull under a running build does no harm
set -u -o pipefail
export LC_ALL=C
unset CDPATH GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE # git sets these when it runs a hook
unset SOURCE_DATE_EPOCH # ggml reads it as "for no CPU in particular"

sdist_name=llama-cpp-python sdist_version=0.3.36
sdist_sha256=832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e
os=$(uname -s)
git_url=${MTPSTATS_LLAMA_GIT:-https://github.com/ggml-org/llama.cpp}
vulkan_min=275 # the first SDK with VK_EXT_layer_settings, which ggml-vulkan uses without asking
cmake_min=3.18
gpus="cuda metal vulkan hip sycl"
self=build_llama.sh

usage() {
    cat <<'END'
usage: ./build_llama.sh [options]

Builds libllama and its ggml libraries as shared libraries for one backend, with a manifest of
their binary interface (abi.json), and prints the directory they were installed to. A build that
is installed already is not repeated.

  --backend NAME     auto, cpu, cuda, metal, vulkan, hip or sycl (default: auto)
  --rpc              add ggml's RPC backend
  --tools            also build llama-server, llama-speculative-simple, llama-quantize
                     and, with --rpc, rpc-server; add llama.cpp's chat templates
  --portable         leave out instructions that only newer CPUs have (x86-64: all beyond AVX2),
                     so that the build runs on other machines; the default uses what this CPU has
  --source PATH      a llama.cpp checkout, or an archive of one, instead of the pinned source
  --ref TAG          clone this tag (or full commit) of upstream llama.cpp instead
  --prefix DIR       install to DIR (new or empty) instead of the builds directory
  -j N, --jobs N     compile N files at a time (default: the number of CPUs)
  --cmake-arg ARG    one more argument for cmake, after all others; repeatable
  --dry-run          print the plan and the cmake line, touch nothing
  -h, --help         this text

Builds live side by side, one directory each, named by source, backend and flags, under
$MTPSTATS_BUILDS (default: $XDG_DATA_HOME/mtpstats/builds or ~/.local/share/mtpstats/builds).
To build one again, remove its directory. A build with --tools also serves where none are asked
for. Other variables: PYTHON (fetches the source through its pip), CC, CXX, CFLAGS, CXXFLAGS,
MTPSTATS_LLAMA_GIT (repository for --ref).

examples:
  ./build_llama.sh                                   the best backend this machine has
  ./build_llama.sh --tools -j 4                      with llama.cpp's own tools
  ./build_llama.sh --backend cuda --cmake-arg -DCMAKE_CUDA_ARCHITECTURES=90
  ./build_llama.sh --source llama_cpp_python-0.3.36.tar.gz      closed network
  ./build_llama.sh --source ../my-fork --backend vulkan --rpc
  ./build_llama.sh --dry-run --portable

exit codes: 0 done, 1 failed while working, 2 bad usage, bad input or a missing toolkit,
130 interrupted
END
}
note() { printf '%s: %s\n' "$self" "$*" >&2; }
die() { note "${@:2}" && exit "$1"; } # die EXIT_CODE MESSAGE
bad_usage() { die 2 "$* (try --help)"; }
have() { command -v "$1" >/dev/null 2>&1; }
hasher=sha256sum
have sha256sum || hasher="shasum -a 256"
sha256() { $hasher "$@" | cut -c 1-64; }
absolute() { (cd "$1" && pwd -P); }
here=$(absolute "$(dirname "${BASH_SOURCE[0]}")") || exit 1
[ -f "$here/mtpstats/llama/abi_probe.c" ] || die 2 "mtpstats/llama is not beside $self: run it from a checkout"

# ---- options

backend=auto rpc=false tools=false portable=false source_path="" ref="" prefix="" jobs="" dry_run=false
user_args=()
while [ $# -gt 0 ]; do
    option=$1
    shift
    case $option in # --name=VALUE and -jN become two words
        --*=*) set -- "${option#*=}" "$@" && option=${option%%=*} ;;
        -j?*) set -- "${option#-j}" "$@" && option=-j ;;
    esac
    case $option in
        --rpc) rpc=true && continue ;;
        --tools) tools=true && continue ;;
        --portable) portable=true && continue ;;
        --dry-run) dry_run=true && continue ;;
        -h | --help) usage && exit 0 ;;
        --backend | --source | --ref | --prefix | -j | --jobs | --cmake-arg) ;;
        *) bad_usage "unknown option $option" ;;
    esac
    [ -n "${1:-}" ] || bad_usage "$option needs a value"
    case $option in
        --backend) backend=$1 ;;
        --source) source_path=$1 ;;
        --ref) ref=$1 ;;
        --prefix) prefix=$1 ;;
        --cmake-arg) user_args+=("$1") ;;
        *) jobs=$1 ;;
    esac
    shift
done
case " auto cpu $gpus " in
    *" $backend "*) ;;
    *) bad_usage "unknown backend '$backend': auto, cpu, ${gpus// /, }" ;;
esac
[ -n "$jobs" ] || jobs=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
case $jobs in *[!0-9]* | 0*) bad_usage "-j wants a number of 1 or more, not '$jobs'" ;; esac
[ -z "$source_path" ] || [ -z "$ref" ] || bad_usage "--source and --ref exclude each other"
case $ref in -* | *[!A-Za-z0-9._/-]*) bad_usage "--ref '$ref' is no tag name" ;; esac
builds=${MTPSTATS_BUILDS:-${XDG_DATA_HOME:-${HOME:-}/.local/share}/mtpstats/builds}
[ -n "${MTPSTATS_BUILDS:-}${XDG_DATA_HOME:-}${HOME:-}" ] || die 2 "no place for builds: set HOME or MTPSTATS_BUILDS"
case $builds in /*) ;; *) builds=$PWD/$builds ;; esac
[ ! -d "$prefix" ] || prefix=$(absolute "$prefix")
case $prefix in "" | /*) ;; *) prefix=$PWD/${prefix%/} ;; esac

# ---- backend and its toolkit

find_tool() { # find_tool NAME DIR...: its path, from PATH or from the usual places
    local name=$1 dir
    shift
    command -v "$name" && return
    for dir in "$@"; do [ -x "$dir/$name" ] && printf '%s\n' "$dir/$name" && return; done
}
nvcc=$(find_tool nvcc "${CUDA_HOME:-${CUDA_PATH:-/usr/local/cuda}}/bin")
cc=${CC:-$(command -v cc || command -v gcc || command -v clang)}
cxx=${CXX:-$(command -v c++ || command -v g++ || command -v clang++)}
header_says() { # header_says HEADER MACRO: the macro's value, as the compiler sees it
    printf '#include <%s>\n%s\n' "$1" "$2" |
        $cc ${VULKAN_SDK:+-I "$VULKAN_SDK/include"} -E -P -x c - 2>/dev/null | tail -n 1
}
lacking() { # lacking BACKEND: prints what this machine lacks to build it; nothing if it lacks nothing
    local header
    case $1 in
        cuda) [ -n "$nvcc" ] || echo "no nvcc (install the CUDA toolkit or put its bin directory on PATH)" ;;
        hip) [ -n "$(find_tool hipcc "${ROCM_PATH:-/opt/rocm}/bin")" ] || echo "no hipcc (install ROCm 6.1 or later)" ;;
        sycl) have icpx || echo "no icpx (install Intel oneAPI and source its setvars.sh)" ;;
        metal) [ "$os" = Darwin ] || echo "no Metal (it exists on macOS only)" ;;
        vulkan)
            header=$(header_says vulkan/vulkan_core.h VK_HEADER_VERSION)
            case $header in *[!0-9]*) header="" ;; esac
            if [ -z "$(find_tool glslc "${VULKAN_SDK:-}/bin")" ]; then
                echo "no glslc (install the Vulkan SDK or your system's glslc package)"
            elif [ -z "$header" ]; then
                echo "no Vulkan headers (install the Vulkan SDK or your system's libvulkan-dev)"
            elif [ "$header" -lt $vulkan_min ]; then
                echo "Vulkan headers 1.3.$header are too old (need 1.3.$vulkan_min: install a newer Vulkan SDK and set VULKAN_SDK)"
            elif [ "$(header_says spirv/unified1/spirv.h SPV_VERSION)" = SPV_VERSION ]; then
                echo "no SPIR-V headers (install the Vulkan SDK or your system's spirv-headers)"
            fi
            ;;
    esac
}
idle() { # idle BACKEND: prints why its toolkit is of no use here; a build without its device runs nothing
    case $1 in
        cuda) nvidia-smi -L >/dev/null 2>&1 || [ -e /proc/driver/nvidia/version ] || echo "nvcc but no NVIDIA GPU (nvidia-smi does not answer)" ;;
        hip) [ -e /dev/kfd ] || echo "hipcc but no AMD GPU (/dev/kfd)" ;;
        *) [ -e /dev/dxg ] || [ "$os" = Darwin ] || compgen -G '/dev/dri/renderD*' >/dev/null || echo "$1 tools but no GPU (/dev/dri)" ;;
    esac
}
why="asked for"
if [ "$backend" = auto ]; then
    why="auto:"
    [ "$os" = Darwin ] && candidates=metal || candidates="cuda hip sycl vulkan"
    for backend in $candidates cpu; do
        [ $backend != cpu ] || break
        found=$(lacking $backend)
        [ -n "$found" ] || found=$(idle $backend)
        [ -n "$found" ] || { why="auto: toolkit and device are here" && break; }
        why="$why ${found%% (*},"
    done
    why=${why%,}
fi

# ---- source

clean_name() { basename "$1" | sed -E 's/\.(tar(\.[a-z0-9]+)?|tgz|tbz2|txz|zip)$//; s/[^A-Za-z0-9._-]+/-/g; s/^[.-]+//'; }
find_tree() { # find_tree DIR: sets $tree to the llama.cpp tree in it: itself, vendored, or one level down
    for tree in "$1" "$1/vendor/llama.cpp" "$1"/*/ "$1"/*/vendor/llama.cpp "$1"/*/llama.cpp; do
        tree=${tree%/}
        [ ! -f "$tree/include/llama.h" ] || [ ! -f "$tree/CMakeLists.txt" ] || break
    done
    [ -f "$tree/include/llama.h" ] || die 2 "no llama.cpp in ${source_path:-the source} (no include/llama.h)"
    # A tree inside somebody else's git repository must not take that one's commit for its own.
    export GIT_CEILING_DIRECTORIES=${tree%/*}
}
tree_hash() { # of contents, not times: a copied or touched tree is the same source
    cd "$tree" || return
    { git ls-files -co --exclude-standard 2>/dev/null | grep . ||
        find . \( -name .git -o -name 'build*' -type d \) -prune -o -type f ! -name '*.gguf' -print; } |
        sort -u | tr '\n' '\0' | xargs -0 $hasher 2>/dev/null | sha256
}
tree="" source_id=$sdist_sha256 source_sha256=""
if [ -n "$ref" ]; then
    # A tag or a commit names one content for good: the build is known without asking the network.
    kind=git source_id="$git_url $ref" source_name=llama.cpp-$(clean_name "$ref") from="$ref of $git_url"
elif [ -d "$source_path" ]; then
    kind=directory
    find_tree "$(absolute "$source_path")"
    source_id=$(tree_hash)
    source_name=$(clean_name "$(absolute "$source_path")") from=$tree
elif [ -n "$source_path" ]; then
    kind=archive
    [ -f "$source_path" ] || die 2 "--source $source_path: no such file or directory"
    source_path=$(absolute "$(dirname "$source_path")")/$(basename "$source_path")
    source_id=$(sha256 "$source_path") || die 2 "cannot read $source_path"
    source_name=$(clean_name "$source_path") from=$source_path
else
    kind=sdist from="$sdist_name $sdist_version, through pip"
fi
[ $kind = git ] || source_sha256=$source_id
[ "$source_id" != $sdist_sha256 ] || source_name=$sdist_name-$sdist_version # also when given by --source

# ---- cmake line and key

on_off() { [ "$1" = "$2" ] && echo ON || echo OFF; }
[ "$os" = Darwin ] && origin=@loader_path || origin="\$ORIGIN"
# With the final rpath from the start, libraries and tools find each other wherever they are moved.
cmake_args=(-DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DCMAKE_BUILD_WITH_INSTALL_RPATH=ON
    "-DCMAKE_INSTALL_RPATH=$origin;$origin/../lib")
for gpu in $gpus; do
    cmake_args+=("-DGGML_$(printf %s "$gpu" | tr '[:lower:]' '[:upper:]')=$(on_off "$gpu" "$backend")")
done
# Not native is AVX2, FMA and F16C on x86-64 (CPUs since 2013) and plain ARMv8 on ARM. Variants that
# ggml chooses at run time would be faster, but are plug-ins that every user of the library must load.
cmake_args+=("-DGGML_RPC=$(on_off $rpc true)" "-DGGML_NATIVE=$(on_off $portable false)")
# Nothing is downloaded while compiling, and no tool needs TLS.
cmake_args+=(-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_CURL=OFF
    -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF)
case $backend in
    cuda)
        [ -z "$nvcc" ] || have nvcc || cmake_args+=("-DCMAKE_CUDA_COMPILER=$nvcc")
        case "$portable ${user_args[*]-}" in
            true* | *CMAKE_CUDA_ARCHITECTURES*) ;;
            *)
                if [ -n "$(idle cuda)" ]; then # native asks the GPU, and there is none to ask
                    why="$why; no GPU here, so for every generation: name one with --cmake-arg -DCMAKE_CUDA_ARCHITECTURES=NN"
                    cmake_args+=(-DCMAKE_CUDA_ARCHITECTURES=all-major)
                fi
                ;;
        esac
        ;;
    sycl) [ -n "${CC:-}${CXX:-}" ] || cmake_args+=(-DCMAKE_C_COMPILER=icx -DCMAKE_CXX_COMPILER=icpx) ;;
    hip)
        [ -n "${HIPCXX:-}" ] || ! have hipconfig || HIPCXX=$(hipconfig -l)/clang
        [ -z "${HIPCXX:-}" ] || export HIPCXX
        ;;
esac
cpu_features() { # what makes one machine's native build another machine's illegal instruction
    [ $portable = false ] || return
    grep -m 1 -E '^(flags|Features|isa)' /proc/cpuinfo 2>/dev/null | tr ' ' '\n' |
        grep -E '^(avx|amx|s?sse|fma|f16c|bmi|vaes|gfni|sve|asimd|i8mm|bf16|rv)' | sort ||
        sysctl -n machdep.cpu.brand_string 2>/dev/null
}
key=$({
    printf '%s\n' mtpstats.abi/1 "$source_id" "${cmake_args[@]}" ${user_args[@]+"${user_args[@]}"} \
        "${CC:-}" "${CXX:-}" "${CFLAGS:-}" "${CXXFLAGS:-}" "${LDFLAGS:-}" "$(uname -sm)"
    cpu_features
} | sha256 | cut -c 1-10)
[ $portable = false ] || key=portable-$key
[ $rpc = false ] || key=rpc-$key
plain_key=$source_name-$backend-$key
key=$plain_key targets=(llama)
if [ $tools = true ]; then
    key=$plain_key-tools
    targets+=(llama-server llama-speculative-simple llama-quantize)
fi
for part in COMMON TOOLS EXAMPLES SERVER; do cmake_args+=("-DLLAMA_BUILD_$part=$(on_off $tools true)"); done
cmake_args+=(${user_args[@]+"${user_args[@]}"})
target_dir=${prefix:-$builds/$key}

# ---- installed already? the plan; what is missing

intact() { # whether the libraries in DIR are those of its manifest
    (cd "$1" && sed -n 's/^ *"\(lib\/[^"]*\)": "\([0-9a-f]*\)".*/\2  \1/p' abi.json | $hasher -c - >/dev/null 2>&1)
}
locked=false
installed() { # prints the directory of a build that serves this request
    local k dir
    for k in "$key" "$plain_key-tools"; do
        dir=${prefix:-$builds/$k}
        grep -qsF "\"key\": \"$k\"" "$dir/abi.json" || continue
        intact "$dir" && printf '%s\n' "$dir" && return
        [ $locked = true ] || note "damaged, not used: $dir"
    done
    return 1
}
complete() { # whether the build found has all that was asked for; older ones lack the templates
    [ $tools = false ] || [ -d "$found/share/templates" ]
}
done_already() { note "installed already, nothing to do:" && printf '%s\n' "$found" && exit 0; }
found=$(installed) && [ $dry_run = false ] && complete && done_already
work_root=${target_dir%/*}/.mtpstats-work # beside the target: installing is one rename
work=$work_root/$plain_key.$$
generator=Ninja
have ninja || ! have make || generator="Unix Makefiles"
cmake_line() { cmake_words=(cmake -S "${tree:-$work/source}" -B "$work/build" -G "$generator" "${cmake_args[@]}"); }
if [ $dry_run = true ]; then
    cmake_line
    printf '%-9s %s\n' source "$from" sha256 "${source_sha256:--}" backend "$backend ($why)" rpc $rpc tools $tools \
        portable $portable jobs "$jobs" prefix "$target_dir" targets "${targets[*]}" installed "${found:-no}"
    printf '\n%s\n' "$(printf '%q ' "${cmake_words[@]}")"
else
    note "backend $backend ($why)"
fi
lacks=$(lacking "$backend")
[ -z "$lacks" ] || die 2 "--backend $backend: $lacks"
have cmake || die 2 "no cmake: install cmake $cmake_min or later"
cmake --version | awk -v min=$cmake_min 'NR == 1 { split($3, v, "."); split(min, m, "."); exit !(v[1] > m[1] || v[1] == m[1] && v[2] >= m[2] + 0) }' ||
    die 2 "$(cmake --version | head -n 1) is too old: need $cmake_min or later"
[ -n "$cc" ] && have "${cxx%% *}" || die 2 "no C++ compiler: install g++ or clang, or set CC and CXX"
[ -z "$ref" ] || have git || die 2 "--ref needs git; or download that tag's archive and pass it with --source"
if [ -n "$prefix" ] && [ -z "$found" ] && [ -n "$(ls -A "$prefix" 2>/dev/null)" ]; then
    die 2 "--prefix $prefix is not empty and holds no such build: remove it or choose another"
fi
[ $dry_run = false ] || exit 0

# ---- one build of a kind at a time; steps that a signal ends

log=$builds/.logs/$key.log lock=$builds/.lock-$plain_key child=""
mkdir -p "$builds/.cache" "$builds/.logs" || die 1 "cannot write to $builds"
cleanup() {
    [ -z "$child" ] || kill -TERM -- "-$child" 2>/dev/null
    [ -z "$child" ] || wait "$child" 2>/dev/null
    rm -rf "$work"
    rmdir "$work_root" 2>/dev/null
    [ $locked = false ] || rm -f "$lock"
}
trap cleanup EXIT
trap 'trap "" INT TERM HUP; note "interrupted; nothing was installed"; exit 130' INT TERM HUP

lives() { # lives PID: whether a build runs under it; a recycled pid is somebody else's
    local args
    if args=$(ps -p "$1" -o args= 2>/dev/null); then
        case $args in *build_llama*) return 0 ;; *) return 1 ;; esac
    fi
    kill -0 "$1" 2>/dev/null
}
told="" tries=0
until ln -s "$(uname -n):$$" "$lock" 2>/dev/null; do # a symlink is made in one step and says who made it
    if ! holder=$(readlink "$lock"); then # released this moment, or never made
        [ $((tries += 1)) -lt 5 ] || die 1 "cannot write to $builds"
        sleep 1
        continue
    fi
    if [ "${holder%:*}" != "$(uname -n)" ]; then
        die 1 "another machine, ${holder%:*}, builds this; if it does not, remove $lock"
    elif ! lives "${holder##*:}"; then
        mv "$lock" "$lock.$$" 2>/dev/null && rm -f "$lock.$$"
    else
        [ -n "$told" ] || note "waiting for the same build, process ${holder##*:}"
        told=yes
        sleep 1
    fi
done
locked=true
found=$(installed) && complete && done_already
rm -rf "$work_root/$plain_key".* # of killed builds: whoever holds the lock is the only one
mkdir -p "$work" || die 1 "cannot write to $work_root"
: >"$log"

progress() { # the log's last "[n/m]" or "[ n%]": in place on a terminal, else a line a minute
    local mark every=60 form='%s\n'
    [ ! -t 2 ] || every=1 form='\r  %s '
    [ $((SECONDS - shown)) -ge $every ] || return 0
    shown=$SECONDS
    mark=$(tail -n 3 "$log" | sed -n 's/^\(\[ *[0-9/%]*\]\).*/\1/p' | tail -n 1)
    # shellcheck disable=SC2059  # one of the two forms above
    [ -z "$mark" ] || printf "$form" "$mark" >&2
}
try() { # try WORDS...: runs them, output to the log, in a process group of their own
    local rc shown=$SECONDS
    printf '\n+ %s\n' "$*" >>"$log"
    set -m
    "$@" </dev/null >>"$log" 2>&1 &
    child=$!
    set +m
    while kill -0 "$child" 2>/dev/null; do
        progress
        sleep 0.2 2>/dev/null || sleep 1
    done
    wait "$child"
    rc=$?
    child=""
    [ ! -t 2 ] || printf '\r               \r' >&2
    return $rc
}
step() { # step WHAT WORDS...: what must succeed
    note "$1"
    try "${@:2}" && return
    tail -n 15 "$log" | sed 's/^/  | /' >&2
    die 1 "failed: $1; full log: $log"
}

# ---- get the source, and ninja where there is nothing to build with

pip=()
need_pip() { # need_pip WHAT: the Python's own pip, else one in a temporary environment; both leave it as it is
    have "${PYTHON:-python3}" || die 2 "no ${PYTHON:-python3} to fetch $1 with: install Python 3 or set PYTHON"
    pip=("${PYTHON:-python3}" -m pip)
    "${pip[@]}" --version >/dev/null 2>&1 && return
    try "${pip[0]}" -m venv "$work/venv" || die 2 "no pip to fetch $1 with: install your system's python3-pip or python3-venv"
    pip=("$work/venv/bin/python" -m pip)
}
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_REQUIRE_VIRTUALENV=0
fetch_sdist() {
    local file=llama_cpp_python-$sdist_version.tar.gz digest
    source_path=$builds/.cache/$file
    if [ -f "$source_path" ]; then
        [ "$(sha256 "$source_path")" != $sdist_sha256 ] || return 0
        note "the cached $source_path is damaged: fetching it again"
        rm -f "$source_path"
    fi
    note "fetching $file through pip"
    need_pip "$file"
    # With the hash, pip checks the file before it runs anything from inside it.
    printf '%s==%s --hash=sha256:%s\n' $sdist_name $sdist_version $sdist_sha256 >"$work/pinned.txt"
    try "${pip[@]}" download --no-deps --no-binary $sdist_name --retries 3 --timeout 20 --dest "$work/fetched" \
        --require-hashes -r "$work/pinned.txt" ||
        die 1 "cannot fetch $file ($(grep -E '^ *ERROR' "$log" | tail -n 1 | cut -c 1-160)); on a closed network get it elsewhere and pass it with --source; log: $log"
    digest=$(sha256 "$work/fetched/$file")
    [ "$digest" = $sdist_sha256 ] || die 1 "checksum mismatch: $file has $digest, not $sdist_sha256"
    mv "$work/fetched/$file" "$source_path"
}
unpack() { mkdir "$work/source" && cd "$work/source" && cmake -E tar xf "$source_path"; }
clone() {
    local name=refs/tags/$ref
    case $ref in *[!0-9a-f]*) ;; ????????????????????????????????????????) name=$ref ;; esac
    git init -q "$work/source" && cd "$work/source" && git fetch -q --depth 1 "$git_url" "$name" && git checkout -q FETCH_HEAD
}
[ $kind != sdist ] || fetch_sdist || exit 1
case $kind in
    sdist) step "unpacking $source_path" unpack ;;
    archive) try unpack || die 2 "--source $source_path is no archive that cmake can unpack; log: $log" ;;
    git) step "cloning $from" clone ;;
esac
[ -n "$tree" ] || find_tree "$work/source"
copy_templates() { # copy_templates DIR: what llama.cpp's tools are tested with, and mtpstats against them
    local f
    mkdir -p "$1" || return
    for f in "$tree"/models/templates/*.jinja; do
        if [ -e "$f" ]; then cp "$f" "$1/" || return; fi
    done
}
add_templates() { copy_templates "$work/templates" && mkdir -p "$found/share" && mv "$work/templates" "$found/share/"; }
if [ -n "$found" ]; then
    step "adding llama.cpp's chat templates" add_templates
    done_already
fi
if ! have ninja && ! have make; then
    need_pip ninja
    step "fetching ninja through pip" "${pip[@]}" install --quiet --target "$work/ninja" ninja
    PATH=$work/ninja/bin:$PATH
fi

# ---- build

if [ $tools = true ] && [ $rpc = true ]; then # it was called rpc-server before
    grep -qs 'ggml-rpc-server' "$tree/tools/rpc/CMakeLists.txt" && targets+=(ggml-rpc-server) || targets+=(rpc-server)
fi
cmake_line
step "configuring" "${cmake_words[@]}"
step "compiling with $jobs jobs; log: $log" cmake --build "$work/build" --parallel "$jobs" --target "${targets[@]}"

stage=$work/stage/${target_dir##*/}
copy_files() {
    local f
    mkdir -p "$stage/lib" || return
    for f in "$work"/build/bin/lib*.so* "$work"/build/bin/lib*.dylib "$work"/build/bin/*.metallib; do
        if [ -e "$f" ]; then cp -RP "$f" "$stage/lib/" || return; fi
    done
    [ $tools = true ] || return 0
    mkdir "$stage/bin" || return
    for f in "${targets[@]:1}"; do cp "$work/build/bin/$f" "$stage/bin/" || return; done
    case $f in ggml-rpc-server) ln -s "$f" "$stage/bin/rpc-server" ;; esac
    copy_templates "$stage/share/templates"
}
step "copying" copy_files

# ---- manifest

library=lib/libllama.so
[ -e "$stage/$library" ] || library=lib/libllama.dylib
exported() { # names as the linker knows them, without Mach-O's leading underscore
    if [ "$os" = Darwin ]; then nm -gU "$stage"/lib/*.dylib; else nm -D --defined-only "$stage"/lib/*.so; fi |
        awk -v os="$os" 'NF == 3 && $2 ~ /[TWi]/ { sub(/@.*/, "", $3); if (os == "Darwin") sub(/^_/, "", $3); print $3 }' | sort -u
}
probe() {
    awk -f "$here/mtpstats/llama/abi_items.awk" "$tree"/ggml/include/ggml.h "$tree"/ggml/include/ggml-backend.h "$tree"/include/llama.h >"$work/abi_items.inc" &&
        $compiler ${CFLAGS:-} -w -I "$work" -I "$tree/include" -I "$tree/ggml/include" \
            "$here/mtpstats/llama/abi_probe.c" -o "$work/probe" && "$work/probe" >"$work/probed" && exported >"$work/exported" && mangled >"$work/mangled"
}
mangled() { # the functions that llama-ext.h declares: plain name, exported name
    [ ! -f "$tree/src/llama-ext.h" ] || sed 's|//.*||' "$tree/src/llama-ext.h" | tr '\n' ' ' |
        grep -o 'LLAMA_API [^(;]*(' | sed 's/[ (]*$//; s/.*[^A-Za-z0-9_]//' | sort -u |
        awk 'NR == FNR { exported[$1]; next }
            { start = "_Z" length($1) $1; for (e in exported) if (e == $1 || index(e, start) == 1) print $1, e }' \
            "$work/exported" - | sort -u -k 1,1
}
quoted() { sed 's/\\/\\\\/g; s/"/\\"/g; s/.*/"&"/' | paste -s -d , -; } # lines on stdin -> JSON strings
string() { if [ -n "$1" ]; then printf '%s\n' "$1" | quoted; else echo null; fi; }
manifest() {
    local separator=""
    printf '{"schema": "mtpstats.abi/1",\n"key": "%s",\n' "$key"
    printf '"source": {"name": %s, "kind": "%s", "sha256": %s, "commit": %s, "version": %s},\n' \
        "$(string "$source_name")" $kind "$(string "$source_sha256")" "$(string "$(git -C "$tree" rev-parse HEAD 2>/dev/null)")" \
        "$(string "$(sed -n 's/^Version: *//p' "$work/build/llama.pc" 2>/dev/null)")"
    printf '"backend": "%s", "portable": %s, "rpc": %s, "tools": %s,\n' "$backend" $portable $rpc $tools
    printf '"cmake_args": [%s],\n' "$(printf '%s\n' "${cmake_args[@]}" | quoted)"
    printf '"compiler": %s,\n' "$(string "$($compiler --version 2>/dev/null | head -n 1)")"
    printf '"built": "%s",\n"library": "%s",\n' "$(date -u +%Y-%m-%dT%H:%M:%SZ)" $library
    cat "$work/probed"
    printf ',\n"symbols": {%s},\n' "$(sed 's/\(.*\) \(.*\)/"\1": "\2"/' "$work/mangled" | paste -s -d , -)"
    printf '"functions": [%s],\n"files": {' "$(grep -E '^(llama|ggml_backend)_' "$work/exported" | quoted)"
    for file in "$stage"/lib/*; do
        [ ! -L "$file" ] || continue
        printf '%s\n  "lib/%s": "%s"' "$separator" "${file##*/}" "$(sha256 "$file")"
        separator=,
    done
    printf '}}\n'
}
compiler=${CC:-$(sed -n 's/^CMAKE_C_COMPILER:[A-Z]*=//p' "$work/build/CMakeCache.txt")} # left to split into words, as is $CC
step "measuring the binary interface" probe
grep -qx llama_decode "$work/exported" || die 1 "the build made no usable libllama; full log: $log"
for needed in llama_set_embeddings_nextn llama_model_n_layer_nextn load_mtp; do
    grep -qw "$needed" "$work/mangled" "$work/exported" "$work/probed" ||
        note "warning: this llama.cpp has no $needed: mtpstats cannot drive MTP heads with it"
done
cp "$log" "$stage/build.log"
manifest >"$stage/abi.json" || die 1 "cannot write to $stage"

# ---- install

trap "" INT TERM HUP
[ -z "$prefix" ] || rmdir "$prefix" 2>/dev/null
[ ! -e "$target_dir/abi.json" ] || mv "$target_dir" "$work/damaged"
mv "$stage" "${target_dir%/*}/" || die 1 "cannot install to $target_dir: something is in the way"
rm -f "$log"
note "installed: $target_dir"
[ -z "$prefix" ] || note "to use it: export MTPSTATS_LIBLLAMA=$target_dir/$library"
printf '%s\n' "$target_dir"
exit 0
}
