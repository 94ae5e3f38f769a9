# tile.cmake: which matrix tile the sim and PTX kernels use; gives LILY_TILE_OPTIONS.
set(LILY_TILE "" CACHE STRING "Tile of the sim and PTX kernels: empty for their own, simdgroup for Apple's (tests only)")
if(LILY_TILE STREQUAL "simdgroup")
  set(LILY_TILE_OPTIONS -DLILY_TILE_SIMDGROUP)
elseif(LILY_TILE STREQUAL "")
  set(LILY_TILE_OPTIONS "")
else()
  message(FATAL_ERROR "LILY_TILE is \"${LILY_TILE}\", wants nothing or simdgroup")
endif()
