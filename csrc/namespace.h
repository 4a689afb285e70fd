// Namespace of the operators: torch.ops.<FLASHATTN_NAMESPACE>.  A build that is loaded beside another has its
// own.
#pragma once

#ifndef FLASHATTN_NAMESPACE
#define FLASHATTN_NAMESPACE "flashattn"
#endif
