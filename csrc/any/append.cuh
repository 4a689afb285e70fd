#pragma once
#include "params.h"
namespace flashattn::any {
template <class E> int launch_append(const DecodeParams&, cudaStream_t) { return 0; }
}
