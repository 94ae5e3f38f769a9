// Availability.h: see os/availability.h.
#pragma once
#include <os/availability.h>
