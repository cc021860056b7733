#!/usr/bin/env bash
# Build Kubernetes from Debian's source package: build.sh PARTS SOURCE OUT. PARTS is a folder with Debian's Go and its
# package reflect2 unpacked; the tarball in SOURCE is the source; OUT gets the programs.
set -euo pipefail
parts=$1 source=$2 out=$3
tarball=$(echo "$source"/*.orig.tar.*)
version=$(sed 's/.*[^0-9.]\([0-9.]*\)\.orig\.tar.*/\1/' <<<"$tarball") # 1.20.5+really1.20.2 is 1.20.2

export GOROOT GOPATH="$source/go" GOCACHE="$source/cache" GOFLAGS='' GO111MODULE=off CGO_ENABLED=0 HOME="$source"
GOROOT=$(echo "$parts"/usr/lib/go-*)
PATH=$GOROOT/bin:$PATH
here=k8s.io/kubernetes
mkdir -p "$out" "$GOPATH/src/$here"
cd "$GOPATH/src/$here"
tar -xf "$tarball" --strip-components=1

# Go from 1.18 on needs a newer one than the source has.
rm -r vendor/github.com/modern-go/reflect2
cp -r "$parts/usr/share/gocode/src/github.com/modern-go/reflect2" vendor/github.com/modern-go/

# What the source leaves to be generated: the schemas of the API.
go build -o "$source/openapi-gen" $here/vendor/k8s.io/kube-openapi/cmd/openapi-gen
folders=$(grep -rl --include='*.go' '+k8s:openapi-gen=' pkg cmd vendor/k8s.io/*/ |
  grep -v -e k8s.io/code-generator -e k8s.io/sample-apiserver -e k8s.io/kube-openapi |
  xargs -n1 dirname | sort -u | sed "s#^#$here/#" | paste -sd,)
"$source/openapi-gen" -i "$folders" -p $here/pkg/generated/openapi -O zz_generated.openapi \
  -h vendor/k8s.io/code-generator/hack/boilerplate.go.txt -r "$source/violations"

stamp='-s -w'
for package in client-go/pkg component-base; do
  at=$here/vendor/k8s.io/$package/version
  stamp+=" -X $at.gitVersion=v$version -X $at.gitMajor=${version%%.*} -X $at.gitMinor=$(cut -d. -f2 <<<"$version")"
done
for program in kube-apiserver kube-controller-manager kube-scheduler kube-proxy kubelet; do
  go build -trimpath -ldflags "$stamp" -o "$out/$program" $here/cmd/$program
done
