#!/bin/sh
# Make a release: every check of it, the wheel, and a tag. Nothing is uploaded.
#     sh deploy/release.sh 0.2.0        (make release VERSION=0.2.0)
set -eu
cd "$(dirname "$0")/.."
version=${1:-}
fail() {
    echo "release: $1" >&2
    exit 2
}
case $version in
*[!0-9.]* | "") fail "VERSION: got '$version'; accepted: a version such as 0.2.0" ;;
esac
[ -z "$(git status --porcelain)" ] || fail "there are changes that are not committed"
[ -z "$(git tag --list "v$version")" ] || fail "v$version is there already; accepted: a new version"
grep -qxF "__version__ = \"$version\"" inference_ladder/__init__.py || fail "inference_ladder/__init__.py names another version"
grep -qxF "version: $version" CITATION.cff || fail "CITATION.cff names another version"
[ "$(grep -m1 '^## ' CHANGELOG.md)" = "## $version" ] || fail "CHANGELOG.md does not begin with $version"
${MAKE:-make} test
${MAKE:-make} wheel
sh deploy/try_wheel.sh "build/wheel/inference_ladder-$version-py3-none-any.whl" "${PYTHON:-python3}"
git tag --annotate "v$version" --message "The Inference Ladder $version"
echo "release: v$version is tagged. Then: git push origin v$version, and add the wheel of build/wheel to its page"
